"""The simulated runtime: a whole job in virtual time, one seed decides everything.

Messages are delayed, reordered between channels, duplicated and dropped; tasks and coordinators crash (or live on as
zombies); storage fails, before or after it has done what it was asked. An oracle watches from outside.
"""
