"""For authors of runtimes: the contract as a test class, a reference runtime, stand-ins for KV caches, a
clock.

Nothing here needs an engine, torch or a device; `contract` needs pytest.
"""
