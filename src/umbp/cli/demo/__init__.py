"""`umbp demo`: a real engine loses a long document from its memory and gets it back from UMBP's pool."""

from umbp.cli.demo.command import demo

__all__ = ["demo"]
