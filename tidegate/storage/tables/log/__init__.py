"""The commit log of an output table: its entries, the table state computed from them, claims of jobs, versions,
vacuums and cuts.
"""
