"""Call a service and wait for its response: the service is a worker, a response is what its handler
returns.

`python examples/request_response.py [mqtt://localhost:1883]` (or SLUICE_MQTT). Any MQTT 5 client
can be either side.
"""

import asyncio
import os
import sys

from pydantic import BaseModel

from sluice.client import Client, RequestTimeout
from sluice.worker import Worker


class Login(BaseModel):
    user: str
    password: str


class Verdict(BaseModel):
    user: str
    welcome: bool


async def main(url: str) -> None:
    app = Worker(url, name="auth")

    @app.task("examples/auth")
    async def check(login: Login) -> Verdict:
        return Verdict(user=login.user, welcome=login.password == "sesame")

    async with Client.from_url(url, client_id="web-1") as client:
        serving = asyncio.create_task(app.serve())
        for login in (Login(user="ann", password="sesame"), Login(user="eve", password="please")):
            answer = await client.request("$queue/examples/auth", login, timeout=10)
            verdict = Verdict.model_validate_json(answer.payload)
            print(f"{verdict.user}: {'welcome' if verdict.welcome else 'go away'}")
        app.stop()
        await serving
        try:
            await client.request("$queue/examples/nobody", "hello?", timeout=0.2)  # words: allowed
        except RequestTimeout as late:
            print(late.what)


asyncio.run(
    main(
        sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SLUICE_MQTT", "mqtt://localhost:1883")
    )
)
