"""A whole job in virtual time, and one seed decides everything: what `tidegate.testing` and `tidegate simulate` use.

`world` has the faults, `runtime` the run, `oracle` what watches it, `pipelines` what a seed draws.
"""
