"""The host's network as the ranks will see it. Addresses stay here: a report is pasted where anybody reads it."""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from src.doctor.facts import Interface

SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
NAME_BYTES = 16  # linux/if.h: IFNAMSIZ
REQUEST_BYTES = 256  # more than a struct ifreq


def interfaces() -> tuple[Interface, ...]:
    """This host's, by name."""
    return tuple(Interface(name, is_up(name), has_ipv4(name)) for _, name in sorted(socket.if_nameindex()))


def is_up(name: str) -> bool:
    """The kernel calls a loopback's state "unknown"."""
    state = Path("/sys/class/net") / name / "operstate"
    return state.exists() and state.read_text().strip() in ("up", "unknown")


def has_ipv4(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            fcntl.ioctl(asked, SIOCGIFADDR, struct.pack(f"{REQUEST_BYTES}s", name.encode()[: NAME_BYTES - 1]))
        except OSError:  # EADDRNOTAVAIL: it has none
            return False
    return True


def own_name_means() -> tuple[str, ...]:
    """What this host's own name resolves to, sorted: "loopback", "other"; nothing where it does not resolve."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    addresses = {str(address[0]).partition("%")[0] for *_, address in found}
    return tuple(
        sorted({"loopback" if ipaddress.ip_address(address).is_loopback else "other" for address in addresses})
    )


def unmatched(wanted: str, names: list[str]) -> list[str]:
    """The parts of a variable such as NCCL_SOCKET_IFNAME that fit none of `names`.

    wanted: prefixes by comma; "=" before them: whole names; "^": all but these, which nothing can fail to fit.
    """
    if wanted.startswith("^"):
        return []
    exact, parts = wanted.startswith("="), [part for part in wanted.lstrip("=").split(",") if part]
    return [part for part in parts if not any(name == part or (name.startswith(part) and not exact) for name in names)]
