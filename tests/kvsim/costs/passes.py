"""What a price says of passes that are made up, and tables of seconds looked up by hand."""

import math

from policies.placement.rule import PassReads


def cell_s(price, decodes, prompt=0, each=None):
    """Seconds for one more cell that a token scans, in a pass of so many tokens that decode, and of a prompt.

    ``each``: cells of each that decodes; by default they have 1,000 together.
    """
    cells = 1000 if each is None else each * decodes

    def seconds(scanned):
        scans = [(1, scanned)] if prompt == 0 else [(prompt, prompt), (1, scanned)]
        return price.seconds(PassReads.counted(prompt + decodes, decodes + (prompt > 0), 0, scans))

    return (seconds(2 * cells) - seconds(cells)) / cells


def looked_up(slopes, knots, tokens):
    """What a piecewise linear table adds up to."""
    pieces = zip(slopes, knots[:-1], [*knots[1:-1], math.inf], strict=True)
    return sum(slope.value * (min(tokens, high) - low) for slope, low, high in pieces if low < tokens)
