"""Cluster stores for tests: the contract as a test class, and stores that run wherever tests do."""
