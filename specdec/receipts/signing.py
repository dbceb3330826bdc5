"""Ed25519 keys, from PEM files as ``openssl genpkey -algorithm ed25519`` writes them. Needs the extra ``receipts``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_MISSING = "needs the package cryptography: pip install 'specdec-serve[receipts]'"


class PublicKey:
    """What checks signatures.

    Args:
        key: The library's.

    Attributes:
        pem: The key as text.
        keyid: SHA-256 of its DER form, in hexadecimal.
    """

    def __init__(self, key: Ed25519PublicKey) -> None:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        form = PublicFormat.SubjectPublicKeyInfo
        self._key = key
        self.pem = key.public_bytes(Encoding.PEM, form).decode()
        self.keyid = hashlib.sha256(key.public_bytes(Encoding.DER, form)).hexdigest()

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Whether a signature of some data was made with this key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """What makes signatures.

    Args:
        key: The library's.

    Attributes:
        public: Checks them.
        keyid: Of that.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key())
        self.keyid = self.public.keyid

    def sign(self, data: bytes) -> bytes:
        """A signature, 64 bytes."""
        return self._key.sign(data)


def load_signing_key(file: str | Path, name: str = "receipts.key_file") -> SigningKey:
    """The private key in a PEM file, which is not encrypted.

    Args:
        file: Its path.
        name: By which an error calls the file.

    Raises:
        InvalidParameterError: The file cannot be read, holds no such key, or the library is missing.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise InvalidParameterError(name, f"{name}: {_MISSING}") from None
    try:
        key = load_pem_private_key(Path(file).expanduser().read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidParameterError(name, f"{name}: {file}: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidParameterError(name, f"{name}: {file} must hold an Ed25519 private key")
    return SigningKey(key)


def read_public_key(pem: str, name: str = "public_key") -> PublicKey:
    """The public key in a PEM text. For the arguments and errors see :func:`load_signing_key`.

    Raises:
        InvalidParameterError: The text holds no such key, or the library is missing.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise InvalidParameterError(name, f"{name}: {_MISSING}") from None
    try:
        key = load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidParameterError(name, f"{name}: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidParameterError(name, f"{name} must be an Ed25519 public key")
    return PublicKey(key)
