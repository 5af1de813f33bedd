"""What stands behind a node pool: a cluster store that objects are fetched from and sent to.

Bytes go between pool slots and the store, never between the store and the engine's own memory: a transfer
that hangs costs a slot, not a block that somebody else owns by then.
"""
