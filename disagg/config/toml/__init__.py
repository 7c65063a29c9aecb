"""TOML read key by key, with errors that point at line and column.

reader    path -> Document: bytes, UTF-8, TOML
locate    line and column of each key and value of a TOML text
table     one TOML table, read key by key
messages  error text: source line with caret, nearest words, printable user text
"""
