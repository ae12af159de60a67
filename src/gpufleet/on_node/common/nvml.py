"""RUNS ON THE NODE: query NVML through its binding `pynvml`, which is sent with the program.

A question is a function of (binding, GPU handle) that returns one fact. The functions here combine
questions.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Iterable

from gpufleet.on_node.common.answers import read

Ask = Callable[[Any, Any], Any]  # (binding, GPU handle) -> value

# Codes of nvmlReturn_t for a query that this driver or board does not know: not supported, no such
# function, no such version of the struct. An older form of the query may still work.
ASK_DIFFERENTLY = {3, 13, 25}


def binding() -> Any:
    """
    Import and return the binding.

    The binding imports a function of `ctypes.util` that it never calls, so that module is replaced.
    Its own imports took 4.5 of the 13 ms that the binding needs to load.
    """
    unused = "ctypes.util"
    stand_in: Any = type(sys)(unused)
    stand_in.find_library = None
    added = sys.modules.setdefault(unused, stand_in) is stand_in
    try:
        import pynvml
    finally:
        if added:
            del sys.modules[unused]
    return pynvml


def start_nvml() -> Any:
    """Import the binding and initialise NVML in this process."""
    pynvml = binding()
    pynvml.nvmlInit()
    return pynvml


def get(function: str, *arguments: Any, keys: tuple[str, ...] = ()) -> Ask:
    """
    Return a question that calls `nvmlDeviceGet<function>`.

    If the function returns a tuple, `keys` are the names of the tuple's members.
    """

    def ask(nvml: Any, gpu: Any) -> Any:
        answer = getattr(nvml, "nvmlDeviceGet" + function)(gpu, *arguments)
        return dict(zip(keys, answer)) if keys else answer  # Python 3.8

    return ask


def get_struct(function: str, structure: str) -> Ask:
    """Return a question whose answer NVML writes to a versioned struct."""

    def ask(nvml: Any, gpu: Any) -> Any:
        import ctypes

        answer = getattr(nvml, structure)()
        getattr(nvml, "nvmlDeviceGet" + function)(gpu, ctypes.byref(answer))
        return answer

    return ask


def first_of(*questions: Ask) -> Ask:
    """
    Return a question that asks these questions in order.

    The answer comes from the first question that the driver and the board support.
    """

    def ask(nvml: Any, gpu: Any) -> Any:
        for question in questions[:-1]:
            try:
                return question(nvml, gpu)
            except nvml.NVMLError as error:
                if error.value not in ASK_DIFFERENTLY:
                    raise
        return questions[-1](nvml, gpu)

    return ask


def text(question: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return a question for text. Its answer is bytes if the text is not UTF-8.

    For such text, the binding itself raises an exception.
    """

    def ask(*arguments: Any) -> Any:
        try:
            return question(*arguments)
        except UnicodeDecodeError as error:
            return bytes(error.object)

    return ask


def number(field_id: int) -> Ask:
    """Return a question for the NVML field with this number."""
    return lambda nvml, gpu: field(nvml, gpu, field_id)


def ask_all(**questions: Ask) -> Ask:
    """Combine questions into one. If one answer is missing, the others remain."""
    return lambda nvml, gpu: table_answers(questions.items(), nvml, gpu)


def field(nvml: Any, gpu: Any, number: int, scope: int = 0) -> int | float:
    """Return the value of the NVML field with this number. Raises NVML's error."""
    (answer,) = nvml.nvmlDeviceGetFieldValues(gpu, [(number, scope)])
    if answer.nvmlReturn:
        raise nvml.NVMLError(answer.nvmlReturn)
    member = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    value: int | float = getattr(answer.value, member[answer.valueType])
    return value


def table_answers(facts: Iterable[tuple[str, Ask]], nvml: Any, gpu: Any) -> dict[str, Any]:
    """Return the answers to a table of questions, by name."""
    return {name: read(ask, nvml, gpu) for name, ask in facts}


def sysfs_bus_id(bus_id: str) -> str:
    """Return NVML's bus id in sysfs' form: "0008:01:00.0" for "00000008:01:00.0"."""
    domain, rest = bus_id.lower().split(":", 1)
    return "%04x:%s" % (int(domain, 16), rest)
