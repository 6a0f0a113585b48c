"""Names the kind of a mistake: typical ones are tried in float64, until one makes what the candidate made.

    trials            the baseline's ops on the candidate's own inputs in float64, with something changed
    mistakes          the catalog of mistakes that people make, each an edit of these ops
    explain           which of them makes the candidate's values up to rounding, and is not right itself
    mistake_search    from a flagged tensor to the questions about it
    hints             the hints of each divergence of a side

Every reported mistake is tried: a difference between two programs that changes no value explains nothing.
"""
