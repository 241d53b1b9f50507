"""Models: the frozen target, the drafter, and what they are built from.

Shape letters, used as suffixes of array names throughout the package:

    B batch          T tokens of a sequence   S keys (cache slots)     A anchors = blocks of a sequence
    W block width    M tapped target layers   D hidden size            N query heads
    K key/value heads   H head size           F MLP size               V vocabulary
    L layers         R rows of a flattened product (what they stand for is said where they appear)
"""
