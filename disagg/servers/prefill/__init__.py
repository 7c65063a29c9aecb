"""What a prefill host serves: KV that it pushes to a decode host, and whole answers.

service    POST /prefill, POST /generate and POST /score
order      which prompt is computed next; pure
scheduler  the thread that computes them
delivery   the transfer of one prompt's KV: who sends it, and in which form
"""
