"""A program that doesn't belong: it connects to a port of this machine, stalls, floods, sends halves, and hangs up.

    python tests/fuzz/visits.py PORT SEED

writes "there" once it has come, and ends after some thousand visits, or when its standard input ends. At most 200 of
its connections are open, and each sends at most 64 KiB.
"""

import collections
import json
import os
import random
import resource
import select
import socket
import struct
import sys

VISITS = 4000
OPEN = 200
LONGEST = 1 << 16
KNOCK = b'{"event": "knock"}\n'
KINDS = ("hello", "knock", "over", "ready", "challenge", "welcome", "prepare", "start", "none of them")
NAMES = ("event", "version", "proof", "nonce", "host", "nodes", "program", "room", "code", "text", "stopped", "asked")
NAMES += ("task", "to", "cluster", "process", "toolkit", "state", "at", "pid")
ODD = (
    None,
    True,
    -1,
    0.5,
    10**300,
    "",
    "\ud800",
    "worker:0",
    "worker:-1",
    "x" * 500,
    "9" * 5000,
    [],
    {},
    [[]],
    {"a": 1},
)


def greeting(chance):
    """A line of JSON that may be an event, a greeting of a task or a report."""
    found = {name: chance.choice(ODD) for name in chance.sample(NAMES, chance.randrange(len(NAMES)))}
    if chance.random() < 0.7:
        found["event"] = chance.choice(KINDS)
    return json.dumps(found).encode() + b"\n"


def words(chance):
    """What one sends."""
    whole = b"".join(greeting(chance) for _ in range(chance.randint(1, 3)))
    return chance.choice(
        (
            b"",
            whole,
            whole,
            whole[: chance.randrange(len(whole))],
            KNOCK * chance.choice((1, 2, LONGEST // len(KNOCK))),
            b"x" * LONGEST,
            chance.choice((b"[", b'{"a":')) * (LONGEST // 5) + chance.choice((b"", b"\n")),
            chance.randbytes(chance.randrange(300)) + b"\n",
            *(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\0\0\x12\x04\0\0", b"\n" * 99),
        )
    )


def _main(port, seed):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # Who is visited has few descriptors, not who visits.
    chance, kept = random.Random(seed), collections.deque()
    for number in range(VISITS):
        if number == OPEN:
            os.write(1, b"there\n")
        if select.select([sys.stdin], [], [], 0.0)[0]:
            return
        try:
            visitor = socket.create_connection(("127.0.0.1", port), timeout=1)
        except OSError:
            continue
        visitor.setblocking(False)
        kept.append(visitor)
        try:
            visitor.send(words(chance))
            for other in chance.sample(kept, min(3, len(kept))):  # Those that stay say a word now and then.
                other.send(chance.choice((b"", KNOCK, b" ")))
        except OSError:
            pass
        while len(kept) > OPEN or (kept and chance.random() < 0.3):
            leaves = kept.popleft()
            if chance.random() < 0.5:
                leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # By a reset.
            leaves.close()


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
