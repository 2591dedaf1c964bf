"""Has an agent of the OpenHands SDK do a task; runs in the environment that has the SDK, and nothing of this project.

Arguments: the model, the base URL, and the task.
"""

import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

if __name__ == "__main__":
    model, base_url, task = sys.argv[1:]
    agent = Agent(
        llm=LLM(model=model, base_url=base_url, api_key=SecretStr("key"), usage_id="agent"),
        tools=[Tool(name=TerminalTool.name)],
    )
    conversation = Conversation(agent=agent, workspace=".", max_iteration_per_run=10)
    conversation.send_message(task)
    conversation.run()
    conversation.close()
