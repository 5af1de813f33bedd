"""For authors of runtimes: the contract as a test class, a reference runtime, stand-ins for KV caches, a
clock, and an engine without a model.

Nothing here needs an engine, torch or a device; but `contract` needs pytest, and `engine` needs vLLM.
"""
