"""Build a kernel module's file with only its description, for `modinfo`, not the kernel. Pure.

`image` returns a relocatable ELF file whose only content is its `.modinfo` section, with the
appended signature that Linux and kmod read the signer from (include/linux/module_signature.h and
scripts/sign-file.c of Linux). The signature is not computed with a key, so no kernel would load the
module.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine, elf.h
_RELOCATABLE, _PROGBITS, _STRTAB, _ALLOC = 1, 1, 3, 2

# DER's tags, ITU-T X.690.
_INTEGER, _OCTETS, _NULL, _OID, _UTF8, _SEQUENCE, _SET, _CONTENT = 2, 4, 5, 6, 12, 48, 49, 160
# Object identifiers in DER: RFC 5652 (signed data, data), RFC 5754 (SHA-512), RFC 8017 (RSA),
# RFC 5280 (common name).
_SIGNED_DATA = bytes.fromhex("2a864886f70d010702")
_DATA = bytes.fromhex("2a864886f70d010701")
_SHA512 = bytes.fromhex("608648016503040203")
_RSA = bytes.fromhex("2a864886f70d010101")
_COMMON_NAME = bytes.fromhex("550403")

_PKCS7 = 2  # enum pkey_id_type
_MAGIC = b"~Module signature appended~\n"


def image(fields: Iterable[tuple[str, str]], arch: str, signer: str | None = None) -> bytes:
    """
    Return a module's file with `fields`, for example ("version", "570.124.06").

    `arch` is the machine's name in `uname -m`. `signer` is the common name of the signing key, or
    None without a signature.
    """
    modinfo = b"".join(f"{key}={value}".encode() + b"\0" for key, value in fields)
    elf = _elf(modinfo, _MACHINES[arch])
    return elf if signer is None else elf + _signature(signer)


def _elf(modinfo: bytes, machine: int) -> bytes:
    """Return an ELF64 file, little-endian: header, two sections, three section headers (elf(5))."""
    names = b"\0.modinfo\0.shstrtab\0"
    padding = b"\0" * (-(64 + len(modinfo) + len(names)) % 8)
    table = 64 + len(modinfo) + len(names) + len(padding)
    ident = b"\x7fELF" + bytes([2, 1, 1]) + b"\0" * 9
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", _RELOCATABLE, machine, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2
    )

    def section(name: int, kind: int, flags: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, kind, flags, 0, offset, size, 0, 0, 1, 0)

    sections = (
        b"\0" * 64,
        section(1, _PROGBITS, _ALLOC, 64, len(modinfo)),
        section(10, _STRTAB, 0, 64 + len(modinfo), len(names)),
    )
    return header + modinfo + names + padding + b"".join(sections)


def _signature(signer: str) -> bytes:
    """Return a PKCS#7 message with its signer, and the trailer with its length."""
    name = _der(_SEQUENCE, _der(_OID, _COMMON_NAME), _der(_UTF8, signer.encode()))
    issuer = _der(_SEQUENCE, _der(_SET, name))
    sha512 = _der(_SEQUENCE, _der(_OID, _SHA512))
    rsa = _der(_SEQUENCE, _der(_OID, _RSA), _der(_NULL))
    version = _der(_INTEGER, b"\1")
    serial = _der(_INTEGER, b"\x5a" * 16)
    made_up = _der(_OCTETS, b"\0" * 256)
    by = _der(_SEQUENCE, version, _der(_SEQUENCE, issuer, serial), sha512, rsa, made_up)
    data = _der(_SEQUENCE, _der(_OID, _DATA))
    signed = _der(_SEQUENCE, version, _der(_SET, sha512), data, _der(_SET, by))
    message = _der(_SEQUENCE, _der(_OID, _SIGNED_DATA), _der(_CONTENT, signed))
    return message + struct.pack(">BBBBB3xI", 0, 0, _PKCS7, 0, 0, len(message)) + _MAGIC


def _der(tag: int, *parts: bytes) -> bytes:
    """Return a value in DER; a length from 128 on is preceded by its number of bytes."""
    content = b"".join(parts)
    size = len(content)
    if size < 128:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 128 | len(length)]) + length + content
