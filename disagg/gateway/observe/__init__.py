"""What happens to requests, for those who watch: metrics, history and the live view.

events     the moments of a request's life, as frozen values
observers  passes each event on to every observer
"""
