"""`disagg chat`: a conversation in the terminal.

command       the arguments, and one turn of a pipe
session       the loop: a line is a command or a message; a turn streams its answer
conversation  what was said, as a frozen value
commands      /help and the others, as a table
editor        reads lines: several at once, history, completion
answer        one answer while it arrives, as Markdown
view          all that is shown
"""
