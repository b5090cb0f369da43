"""Writes dropout_stream.json, the frozen masks of docs/dropout.md, from Python integers alone.

Nothing here is shared with an implementation. Run it only to add entries: an entry that changes is
a broken stream, and every checkpoint resumed in mid-training would change with it.
"""

import json
from pathlib import Path

MASK = 0xFFFFFFFF
PATH = Path(__file__).with_name("dropout_stream.json")


def philox(counter, key, rounds):
    c, k = list(counter), list(key)
    for _ in range(rounds):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & MASK,
            (first >> 32) ^ c[3] ^ k[1],
            first & MASK,
        ]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def bits(state, c0, c1, site, word, half):
    seed, offset = state
    words = philox((c0, c1, site, offset & MASK), (seed & MASK, (seed >> 32) & MASK), 7)
    return words[word] >> 16 * half & 0xFFFF


def row_mask(state, rows, columns, threshold, site):
    calls = -(-columns // 8)
    text = ""
    for r in range(rows):
        for c in range(columns):
            call = r * calls + c // 8
            value = bits(state, call & MASK, call >> 32, site, c % 8 // 2, c % 2)
            text += "1" if value >= threshold else "0"
    return text


def score_mask(state, sequence, heads, queries, keys, threshold, site):
    text = ""
    for head in range(heads):
        for r in range(queries):
            for c in range(keys):
                place = (r // 16 * 8 + r % 8) << 16 | (c // 16 * 4 + c % 8 // 2)
                word = 2 * (r % 16 // 8) + c % 16 // 8
                value = bits(state, place, sequence * heads + head, site, word, c % 2)
                text += "1" if value >= threshold else "0"
    return text


def hexadecimal(text):
    return f"{int(text or '0', 2):x}"


STATES = ((0, 0), (-1, 1), (0x0123456789ABCDEF, 2**33 + 5), (-(2**62), -7))
ROWS = ((1, 1), (3, 17), (5, 48), (2, 770))
SCORES = ((0, 1, 1, 1), (3, 2, 17, 33), (70_000, 3, 9, 40), (1, 1, 40, 18))


def main():
    known = {
        "zeros": ((0,) * 4, (0,) * 2),
        "ones": ((MASK,) * 4, (MASK,) * 2),
        "pi": (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
        ),
    }
    golden = {
        "philox": [
            {
                "name": name,
                "rounds": rounds,
                "counter": counter,
                "key": key,
                "words": [f"{w:08x}" for w in philox(counter, key, rounds)],
            }
            for name, (counter, key) in known.items()
            for rounds in (7, 10)
        ],
        "rows": [
            {
                "state": state,
                "shape": shape,
                "threshold": threshold,
                "site": site,
                "keep": hexadecimal(row_mask(state, *shape, threshold, site)),
            }
            for state in STATES
            for shape, threshold, site in zip(
                ROWS, (6554, 32768, 1, 65535), (1, 2, 0xFFFFFFF8, 98), strict=True
            )
        ],
        "scores": [
            {
                "state": state,
                "sequence": shape[0],
                "shape": shape[1:],
                "threshold": threshold,
                "site": site,
                "keep": hexadecimal(score_mask(state, *shape, threshold, site)),
            }
            for state in STATES
            for shape, threshold, site in zip(
                SCORES, (32768, 6554, 13107, 60000), (0, 8, 88, 16), strict=True
            )
        ],
    }
    PATH.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
