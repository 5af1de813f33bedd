"""Cluster stores: what keeps objects beyond this host, behind one small protocol."""
