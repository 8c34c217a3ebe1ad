"""What a driver script is made of.

`environment.py` is where it begins, and `topologies.py` says where jobs run. `streams/` describes a program, and
`program.py` holds it until it runs. `submission/` makes a job of it, `tables/` has what jobs write, `config/` settings.
"""
