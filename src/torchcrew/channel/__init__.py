"""Messages between two processes: a small header on a socket, the data in shared memory."""

__all__ = ()
