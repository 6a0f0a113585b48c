"""What kind of mistake it is: typical mistakes are tried in float64, and one that makes what the candidate made is it.

    question    the baseline's op (or region) on the candidate's own inputs; what is right, what the candidate made
    trial       the same in float64 with something changed: an argument, an operand, an op
    catalog   the mistakes that people make, one family a file
    explain     which of them reproduces the candidate's values up to rounding, and is not right itself

Every reported mistake is tried: a difference between two programs that changes no value explains nothing.
"""
