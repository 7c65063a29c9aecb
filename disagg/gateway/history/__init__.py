"""Finished requests in a SQLite file, bounded by age and rows.

entry     the record of one answer
store     the file: append, prune, read
recorder  the observer: a bounded queue and the one thread that writes
"""
