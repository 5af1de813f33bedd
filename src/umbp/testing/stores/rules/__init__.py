"""The store contract, rule by rule; `umbp.testing.stores.contract` puts them together."""
