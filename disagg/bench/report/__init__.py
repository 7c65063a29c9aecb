"""A result as one self-contained HTML page.

page     the document and its text
cards    the charts with their titles and legends
table    all figures
charts   lines and bars as SVG, of any data
"""
