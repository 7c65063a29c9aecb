"""Matchers of llguidance in processes of their own, since a schema can make a parser take any time or memory, or crash.

    server process                fork server (forkserver.py)       one process per form (process.py)
    Constraint --- control ---->  has the tokenizer, forks one
        |                         process per form, and ends it ->  compiles the form, has a matcher per answer
        |                         for its time or memory                 |
        +------- a socket and shared memory of each answer --------------+

limits       what a form may cost, what is refused before anything is compiled, and why a form was refused
link         the server's ends of it: the fork server's process, and what an answer shares with its own
wire         what crosses the sockets, and the shared memory
forkserver   the program that forks, watches and ends the processes of forms
notation     grammars as their callers write them
process      the program of such a process

`constraint` is the server's side. Nothing here imports numpy or a framework: the fork server starts in a tenth of a
second, and its memory is the tokenizer's.
"""
