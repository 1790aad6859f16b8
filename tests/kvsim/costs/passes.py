"""What a price says of passes that are made up, and tables of seconds looked up by hand."""

import math

from policies.placement.rule import PassReads


def cell_s(price, decodes, prompt=0):
    """Seconds for one more cell that a token scans, in a pass of so many tokens that decode, and of a prompt."""

    def seconds(cells):
        scans = [(1, cells)] if prompt == 0 else [(prompt, prompt), (1, cells)]
        return price.seconds(PassReads.counted(prompt + decodes, decodes + (prompt > 0), 0, scans))

    return (seconds(2000) - seconds(1000)) / 1000


def looked_up(slopes, knots, tokens):
    """What a piecewise linear table adds up to."""
    pieces = zip(slopes, knots[:-1], [*knots[1:-1], math.inf], strict=True)
    return sum(slope.value * (min(tokens, high) - low) for slope, low, high in pieces if low < tokens)
