"""The client of a schema registry: what is tried again, refused, and kept out of texts."""

from __future__ import annotations

import datetime as dt
import ipaddress
import pickle
import ssl
from pathlib import Path

import pytest
from registry_server import registry_server

from tidegate.connectors.formats.registry import (
    TRIES,
    RegistryClient,
    RegistryError,
    SchemaRegistry,
    UnknownSchemaError,
)
from tidegate.storage.errors import ConfigurationError


def client(registry: SchemaRegistry | str) -> tuple[RegistryClient, list[float]]:
    """A client that notes its pauses and does not wait."""
    pauses: list[float] = []
    found = SchemaRegistry.of(registry)
    assert found is not None
    return RegistryClient(found, pauses.append), pauses


def test_a_registry_that_fails_for_a_moment_is_asked_again() -> None:
    """After a pause that grows; a connection that breaks counts as a failure."""
    with registry_server() as server:
        number = server.add("s", "{}", "JSON")
        server.failures += [503, 0, 429]
        asked, pauses = client(server.url)
        assert asked.by_id(number).text == "{}"
        assert len(server.requests) == 4
        assert pauses == sorted(pauses)
        assert len(pauses) == 3


def test_tries_are_bounded() -> None:
    """Then the error has the address and the last answer."""
    with registry_server() as server:
        server.failures += [500] * 100
        asked, _ = client(server.url)
        with pytest.raises(RegistryError, match=f"{server.url} does not answer: 500 try again"):
            asked.latest("s")
        assert len(server.requests) == TRIES
    with pytest.raises(RegistryError, match="does not answer"):
        asked.latest("s")


def test_another_address_of_the_registry_is_tried() -> None:
    """Without a pause."""
    with registry_server() as gone:
        pass
    with registry_server() as server:
        server.add("s", "{}", "JSON")
        asked, pauses = client(f"{gone.url},{server.url}/")
        assert asked.latest("s").kind == "JSON"
        assert pauses == []


def test_passwords_are_sent_and_not_shown() -> None:
    """In the address or beside it; without them the registry refuses access."""
    with registry_server("me", "p@ss:word") as server:
        server.add("s", "{}", "JSON")
        with pytest.raises(ConfigurationError, match=r"refuses access \(401 Unauthorized\)"):
            client(server.url)[0].latest("s")
        for registry in (
            SchemaRegistry(server.url, user="me", password="p@ss:word"),
            SchemaRegistry(server.url.replace("://", "://me:p%40ss%3Aword@")),
        ):
            assert client(pickle.loads(pickle.dumps(registry)))[0].latest("s").schema_id == 1
            assert "word" not in repr(registry)
            assert registry.url == server.url


def test_a_subject_with_any_name() -> None:
    """Slashes and blanks are part of the name."""
    with registry_server() as server:
        asked, _ = client(server.url)
        assert asked.id_of("a/b c?d", "AVRO", '"int"', register=True) == 1
        assert asked.latest("a/b c?d").text == '"int"'
        with pytest.raises(UnknownSchemaError):
            asked.id_of("a/b c?d", "AVRO", '"long"', register=False)


@pytest.mark.parametrize("url", ["localhost:8081", "ftp://host", "http://", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """When the registry is named."""
    with pytest.raises(ConfigurationError, match=r"this is not an address; give one such as http://host:8081"):
        SchemaRegistry(url)


def test_a_refused_address_shows_no_password() -> None:
    """The rest of the address is shown."""
    with pytest.raises(ConfigurationError, match=r"^SchemaRegistry\('host:8081'\): this is not an address"):
        SchemaRegistry("user:secret@host:8081")


def test_what_is_no_registry_is_an_error() -> None:
    """Its answers have no schema."""
    with registry_server() as server:
        asked, _ = client(server.url)
        server.schemas[1] = {"name": "x"}
        with pytest.raises(RegistryError, match="returned no schema"):
            asked.by_id(1)


def certificate(folder: Path) -> tuple[str, str]:
    """Paths of a certificate of this machine, which signs itself, and of its key."""
    pytest.importorskip("cryptography", reason="needs pip install cryptography, to make a certificate")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "registry")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "registry.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "registry.key").write_bytes(private)
    return str(folder / "registry.pem"), str(folder / "registry.key")


def test_certificates_are_verified_and_presented(tmp_path: Path) -> None:
    """Only a trusted certificate is accepted, and a server may require one of the client."""
    path, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(path, key)
    tls.load_verify_locations(path)
    tls.verify_mode = ssl.CERT_REQUIRED
    with registry_server("me", "secret", tls) as server:
        number = server.add("s", "{}", "JSON")
        known = SchemaRegistry(server.url, user="me", password="secret", ca=path, certificate=path, key=key)
        assert client(known)[0].by_id(number).text == "{}"
        with pytest.raises(RegistryError, match="CERTIFICATE_VERIFY_FAILED"):
            client(SchemaRegistry(server.url, certificate=path, key=key))[0].by_id(number)
        with pytest.raises(RegistryError, match="does not answer"):
            client(SchemaRegistry(server.url, ca=path))[0].by_id(number)
        with pytest.raises(ConfigurationError, match="the certificates cannot be loaded"):
            client(SchemaRegistry(server.url, ca=str(tmp_path / "missing.pem")))
