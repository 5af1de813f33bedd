"""Runtimes around a runtime, one concern each: `metered` counts, `faulty` fails, `slow` takes its time.

A wrapper keeps the contract, states the capabilities of what it wraps and passes every extra verb on.
"""
