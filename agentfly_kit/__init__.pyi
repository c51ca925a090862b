from agentfly_kit import advantages as advantages
from agentfly_kit import chat as chat
from agentfly_kit import envs as envs
from agentfly_kit import errors as errors
from agentfly_kit import filters as filters
from agentfly_kit import losses as losses
from agentfly_kit import tiny as tiny
from agentfly_kit import toolbox as toolbox
from agentfly_kit import trl as trl
from agentfly_kit import widgets as widgets  # type: ignore[attr-defined]  # its folder is widgets/
from agentfly_kit.batch import Batch as Batch
from agentfly_kit.batch import collate as collate
from agentfly_kit.budget import Budget as Budget
from agentfly_kit.capacity import Capacity as Capacity
from agentfly_kit.chat import Chat as Chat
from agentfly_kit.context import Context as Context
from agentfly_kit.context import FromPool as FromPool
from agentfly_kit.context import FromTask as FromTask
from agentfly_kit.data import Tasks as Tasks
from agentfly_kit.data import load_tasks as load_tasks
from agentfly_kit.data import tasks_from as tasks_from
from agentfly_kit.diagnosis import doctor as doctor
from agentfly_kit.engines.local import LocalEngine as LocalEngine
from agentfly_kit.engines.openai import OpenAIEngine as OpenAIEngine
from agentfly_kit.engines.scripted import ScriptedEngine as ScriptedEngine
from agentfly_kit.engines.vllm import VLLMEngine as VLLMEngine
from agentfly_kit.errors import RunMismatch as RunMismatch
from agentfly_kit.errors import ToolError as ToolError
from agentfly_kit.evaluation import evaluate as evaluate
from agentfly_kit.policy import Policy as Policy
from agentfly_kit.pool import Pool as Pool
from agentfly_kit.pool import pools as pools
from agentfly_kit.ppo import adamw as adamw
from agentfly_kit.ppo import ppo_step as ppo_step
from agentfly_kit.ppo import ppo_step_async as ppo_step_async
from agentfly_kit.ppo import shaped_rewards as shaped_rewards
from agentfly_kit.record import Rollout as Rollout
from agentfly_kit.remote.client import RemotePool as RemotePool
from agentfly_kit.remote.server import serve_pool as serve_pool
from agentfly_kit.rewards import reward as reward
from agentfly_kit.rollout import Agent as Agent
from agentfly_kit.runs import Run as Run
from agentfly_kit.sandboxes import sandbox_report as sandbox_report
from agentfly_kit.sandboxes.container import Container as Container
from agentfly_kit.sandboxes.files import FileSandbox as FileSandbox
from agentfly_kit.sandboxes.python import PythonSandbox as PythonSandbox
from agentfly_kit.sandboxes.shell import ShellSandbox as ShellSandbox
from agentfly_kit.sandboxes.sql import SQLSandbox as SQLSandbox
from agentfly_kit.tools import ToolSet as ToolSet
from agentfly_kit.tools import tool as tool
from agentfly_kit.trainer import TrainConfig as TrainConfig
from agentfly_kit.trainer import train as train
from agentfly_kit.types import Failure as Failure
from agentfly_kit.types import Group as Group
from agentfly_kit.types import Row as Row
from agentfly_kit.types import Sample as Sample
from agentfly_kit.types import Sampling as Sampling
from agentfly_kit.types import Stats as Stats
from agentfly_kit.types import Task as Task
from agentfly_kit.types import ToolCall as ToolCall
from agentfly_kit.types import ToolResult as ToolResult
from agentfly_kit.types import Trajectory as Trajectory
from agentfly_kit.types import Turn as Turn

__version__: str
__all__: list[str]

def __dir__() -> list[str]: ...
