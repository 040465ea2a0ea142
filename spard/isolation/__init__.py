"""Processes that reach little: namespaces with a private root, or Landlock, and a filter of system calls.

Nothing here imports more than the standard library, and little of it: a process that isolates itself starts with it.
"""
