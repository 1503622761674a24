"""Supervised groups of worker processes: how they start, are watched, and end.

guardian.py, guardian_main.py   kills the workers when the user's process dies
zygote.py, zygote_*.py          starts workers in milliseconds, with torch already imported
functions.py                    functions and classes on their way: by reference or by value
situation.py                    what a new process takes from its parent
board.py                        flags and counters of a crew in one shared page
cpus.py                         how many cores this process may use
rank.py                         which rank of a crew this process is
hints.py                        what a worker's error means on this machine
"""

__all__: tuple[str, ...] = ()
