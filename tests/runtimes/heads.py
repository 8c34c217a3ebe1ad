"""A server that answers as the head of a Ray cluster does when it is asked for the id of its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

METHOD = "GetClusterId"
ID = b"the id of a cluster"


@contextmanager
def head(code: Any, method: str = METHOD) -> Iterator[str]:
    """Give the address of a server that answers with this code. `method`: the one that it has."""

    def answer(request: bytes, context: Any) -> bytes:
        if code is not grpc.StatusCode.OK:
            context.abort(code, "InvalidAuthToken")
        return ID

    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
