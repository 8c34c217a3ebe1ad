"""The simulated runtime: runs a whole job in virtual time. Everything that happens is determined by one seed.

Messages are delayed, reordered between channels, duplicated and dropped. Tasks and coordinators crash, or continue to
run as zombies after they were replaced. Storage operations fail before or after they have taken effect. An oracle
checks the job from outside.
"""
