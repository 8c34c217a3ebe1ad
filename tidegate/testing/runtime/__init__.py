"""The simulated runtime: a whole job in virtual time, determined by one seed.

Messages are delayed, reordered between channels, duplicated and dropped. Tasks and coordinators crash, or live on as
zombies. Storage fails before or after an operation has taken effect. An oracle checks the job from outside.
"""
