"""The token of a rendezvous, which proves that a launcher belongs to the job. The token itself is never sent.

Who listens makes one for each job, unless TOOLKIT_TOKEN gives it, and keeps it in a file that only its user may read:
launchers that share the home directory find it there. Others are given it in TOOLKIT_TOKEN. Each side sends a number
that is used once, and answers the other's with an HMAC over both (RFC 2104), each in its own role.
"""

import contextlib
import hashlib
import hmac
import os
import pathlib
import secrets

from toolkit.errors import LaunchError
from toolkit.launch.job.spec import JobSpec
from toolkit.support import files

__all__ = ["VARIABLE", "file", "forget", "make", "nonce", "program_of", "proof", "proves", "read", "words"]

VARIABLE = "TOOLKIT_TOKEN"
_LEAST = 12  # Characters. With random letters and digits, that is 60 bits or more.


def make(address: str) -> str:
    """Returns the token of a job whose launchers connect to an address: the given one, or a new one.

    A new one is kept for launchers that share this home directory. Where it can't be, they are given it by hand.

    Args:
        address: HOST:PORT, as every launcher is given it.

    Raises:
        LaunchError: TOOLKIT_TOKEN is so short that it can be guessed.
    """
    if given := os.environ.get(VARIABLE):
        if len(given) < _LEAST:
            raise LaunchError(
                asked=f"{VARIABLE} is to prove who belongs to the job at {address}",
                found=f"it has {len(given)} characters, which can be guessed",
                remedy=f"Give it at least {_LEAST}, such as what `openssl rand -hex 16` writes, on every host",
            )
        return given
    token = secrets.token_urlsafe(18)
    forget(address)
    try:
        files.make_directory(file(address).parent)
        with open(os.open(file(address), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write(token)
    except OSError:
        forget(address)  # A partly written token doesn't count.
    return token


def read(address: str) -> str:
    """Returns the token of a launcher that connects to an address; "" if it has none."""
    with contextlib.suppress(OSError):
        return os.environ.get(VARIABLE) or file(address).read_text()
    return ""


def forget(address: str) -> None:
    """Removes the file when the job is over or begins."""
    with contextlib.suppress(OSError):
        file(address).unlink()


def nonce() -> str:
    """Returns a random text that is used once."""
    return secrets.token_hex(16)


def proof(token: str, role: str, *numbers: str) -> str:
    """Returns a proof that one has the token, without revealing it.

    Args:
        token: The token.
        role: Whose proof it is, so that neither side's can be sent back as the other's.
        numbers: Both sides' numbers, the listener's first.
    """
    return hmac.new(token.encode(), " ".join((role, *numbers)).encode(), hashlib.sha256).hexdigest()


def proves(found: object, token: str, role: str, *numbers: str) -> bool:
    """Returns whether a text is such a proof."""
    return isinstance(found, str) and hmac.compare_digest(found.encode(), proof(token, role, *numbers).encode())


def words(address: str, token: str, *, shown: bool) -> str:
    """Returns how other hosts get the token if they share no home directory: the token, or the name of its file."""
    visible = token if shown else f"..., which is in {file(address)}"
    return f"launch: start hosts that don't share this home directory with {VARIABLE}={visible}"


def program_of(spec: JobSpec) -> str:
    """Returns what distinguishes the jobs that gather at one address."""
    return hashlib.sha256(repr((spec.command, spec.counts)).encode()).hexdigest()[:16]


def file(address: str) -> pathlib.Path:
    """Returns where a token is kept, in a file that only its user can read."""
    return files.state_directory() / "rendezvous" / hashlib.sha256(address.encode()).hexdigest()[:16]
