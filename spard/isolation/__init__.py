"""Isolated processes: namespaces with a private root, or Landlock, and a system-call filter.

Modules here import little, and only from the standard library, because every isolated process loads them at its start.
"""
