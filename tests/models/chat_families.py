# SPDX-License-Identifier: Apache-2.0
"""Chat templates of the kinds that published models have, and the control tokens of each.

Written after the formats that models document, in the idioms that their templates use: joins and
`~`, trims, cuts, splits, macros, namespaces, blocks, JSON.
"""

LOOP = "{% for message in messages %}"
END = "{% endfor %}"
ROLE, CONTENT = "message['role']", "message['content']"


def turns(
    before: str, after: str, ask: str, *, first: str = "", content: str = "message.content"
) -> str:
    """A template that puts every message between two texts, in which `R` is the role."""
    role = "{{ message.role }}"
    before, after = before.replace("R", role), after.replace("R", role)
    return (
        f"{first}{LOOP}{before}{{{{ {content} }}}}{after}{END}"
        f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    )


def by_role(user: str, assistant: str, system: str, ask: str, *, first: str = "") -> str:
    """A template with a text for each role, in which `$` is the content."""
    texts = {"user": user, "assistant": assistant, "system": system}
    branches = "".join(
        f"{{% {'if' if role == 'user' else 'elif'} {ROLE} == '{role}' %}}"
        "{{ '" + text.replace("$", f"' + {CONTENT} + '") + "' }}"
        for role, text in texts.items()
    )
    last = "{{ message.name }}{{ message.tool_call_id }}: {{ message.content }}\n"
    return (
        f"{first}{LOOP}{branches}{{% else %}}{last}{{% endif %}}{END}"
        f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    )


TOOLS_XML = (
    "{%- if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}"
    "{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '</tools><|im_end|>\n' }}{% endif %}"
)
CALLS_XML = (
    "{% for tool_call in message.tool_calls %}{% if tool_call.function is defined %}"
    '{% set tool_call = tool_call.function %}{% endif %}{{ \'\n<tool_call>\n{"name": "\' }}'
    '{{ tool_call.name }}{{ \'", "arguments": \' }}{{ tool_call.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
CHATML = turns("<|im_start|>R\n", "<|im_end|>\n", "<|im_start|>assistant\n")
QWEN25 = (
    TOOLS_XML + "{%- for message in messages %}"
    "{%- if message.role == 'user' or message.role == 'system' "
    "or message.role == 'assistant' and not message.tool_calls %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}" + CALLS_XML +
    "{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}"
    "{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)  # fmt: skip
QWEN3 = (
    TOOLS_XML
    + """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not
        (message.content.startswith('<tool_response>')
         and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{% set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning =
                content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if reasoning and loop.index0 > ns.last_query_index %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}"""
    + CALLS_XML
    + """\
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}{% if loop.first and system_message %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] != 'assistant' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA31 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none and tools is defined %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{% endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{% endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL_V3 = """\
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools and message == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{% set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{% endif %}
                    {%- if not loop.last %}{{- ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}{{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}{% set out = tool_call.function | tojson %}
            {{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ", " }}
        {{- '"call_id": "' + message.tool_call_id[-9:] + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- "[SYSTEM_PROMPT]" ~ message.content ~ "[/SYSTEM_PROMPT]" }}{% endif %}
{%- endfor %}"""
PHI4_MINI = """\
{%- for message in messages %}
    {%- if message['role'] == 'system' and tools is defined and tools %}
        {{- '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' }}
        {{- tools | tojson }}{{- '<|/tool|>' + '<|end|>' }}
    {%- else %}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% else %}{{- eos_token }}{% endif %}"""
HERMES = """\
{%- macro kind(spec) %}
    {%- if spec.type == "string" %}{{- "str" }}{% else %}{{- spec.type }}{% endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
    {{- "<|im_start|>system\\n<tools> " }}
    {%- for tool in tools %}{% set tool = tool.function if tool.function else tool %}
        {{- '{"name": "' + tool.name + '", "description": "' }}
        {%- for name, spec in (tool.parameters.properties or {}).items() %}
            {{- name + ": " + kind(spec) }}{{- ", " if not loop.last }}
        {%- endfor %}
        {{- '", "parameters": ' }}{{- tool.parameters | tojson }}{{- "}\\n" }}
    {%- endfor %}
    {{- "</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}{{- message.content or '' }}"""  # goes on below
HERMES += CALLS_XML + "{{- '<|im_end|>' + '\\n' }}{%- endfor %}"
HERMES += "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
DEEPSEEK_R1 = """\
{%- set ns = namespace(is_first=false, system_prompt='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{% endif %}
{%- endfor %}
{{- bos_token }}{{- ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}
            {{- tool['function']['name'] }}
            {{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}"""
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{% set first_user_prefix = "" %}{% set loop_messages = messages %}{% endif %}
{%- for message in loop_messages %}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {{- message['content'] | trim }}{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""
COMMAND_R = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role | lower == 'user' %}
        {{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content.strip() }}
    {%- elif message.role | lower == 'assistant' %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + message.content.strip() }}
    {%- else %}{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + message.content }}
    {%- endif %}{{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""
GRANITE = """\
{%- macro turn(role, content) %}
{{- '<|start_of_role|>' ~ role ~ '<|end_of_role|>' ~ content ~ '<|end_of_text|>\\n' }}
{%- endmacro %}
{%- if tools %}{{- turn('tools', tools | tojson(indent=2)) }}{% endif %}
{%- for message in messages %}{{- turn(message.role, message.content) }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""
GPT_OSS = """\
{%- macro schema(spec) %}
    {%- for key, value in (spec or {}).items() %}{{- key }}{{- ": " }}{{- value.type or "any" }}
        {{- ",\\n" if not loop.last }}{% endfor %}
{%- endmacro %}
{%- for tool in tools or [] %}
    {{- "<|start|>developer<|message|>type " + tool.function.name + " = (_: {" }}
    {{- schema(tool.function.parameters.properties) }}{{- "}) => any;<|end|>" }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name }}
        {{- "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson }}{{- "<|call|>" }}
    {%- else %}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif %}"""
KIMI = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}<|im_user|>user<|im_middle|>
    {%- elif message.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>
    {%- else %}<|im_system|>{{ message.name or message.role }}<|im_middle|>{% endif %}
    {{- message.content }}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
VICUNA = by_role(
    "USER: $ ", "ASSISTANT: $</s>", "$\n\n", "ASSISTANT:", first="{{ bos_token }}"
)  # fmt: skip
BLOCKS = """\
{% set system %}{% for message in messages if message.role == 'system' %}{{ message.content }}
{% endfor %}{% endset %}
{% filter trim %}<|im_start|>system
{{ system | trim }}<|im_end|>{% endfilter %}
{% for role, group in messages | groupby('role') %}{% for message in group %}
<|im_start|>{{ role }}
{{ message.content.splitlines() | join('\\n') }}<|im_end|>{% endfor %}{% endfor %}"""
CHANGES = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.replace('\\r', '').removeprefix(' ').partition('###')[0] * 1 }}
{{- '\\n'.join((message.content | upper).split('\\n')) }}{{ message.content[::-1][::-1] }}
{{- message.content.rsplit(' ', 1)[-1] | capitalize }}<|im_end|>{% endfor %}"""

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_LLAMA2_TOKENS = ("<s>", "</s>")
_LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
)  # fmt: skip
_PHI_TOKENS = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
_DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_COHERE_TOKENS = (
    "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
)  # fmt: skip
_GRANITE_TOKENS = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
_HARMONY_TOKENS = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>")
_KIMI_TOKENS = (
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"
)  # fmt: skip

_BOS = "{{ bos_token }}"
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (CHATML, _CHATML_TOKENS),
    "chatml_trim": (
        turns("<|im_start|>R\n", "<|im_end|>\n", "<|im_start|>assistant\n",
              content="message.content | trim"), _CHATML_TOKENS),
    "qwen1.5": (
        turns("<|im_start|>R\n", "<|im_end|>\n", "<|im_start|>assistant\n",
              first="{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n"
                    "{% endif %}"), _CHATML_TOKENS),
    "qwen2.5": (QWEN25, _CHATML_TOKENS),
    "qwen3": (QWEN3, _CHATML_TOKENS),
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        _CHATML_TOKENS),
    "yi": (turns("<|im_start|>R\n", "<|im_end|>\n", "<|im_start|>assistant\n", first=_BOS),
           ("<|startoftext|>", *_CHATML_TOKENS)),
    "internlm2": (turns("<|im_start|>R\n", "<|im_end|>\n", "<|im_start|>assistant\n", first=_BOS),
                  ("<s>", "</s>", *_CHATML_TOKENS)),
    "hermes3": (HERMES, ("<s>", *_CHATML_TOKENS)),
    "hermes2": (turns("<|im_start|>R\n", "<|im_end|>\n", "<|im_start|>assistant\n", first=_BOS),
                ("<|begin_of_text|>", *_CHATML_TOKENS)),
    "dolphin": (turns("<|im_start|>R\n", "<|im_end|>\n", "<|im_start|>assistant\n",
                      content="message['content'].strip()"), _CHATML_TOKENS),
    "orca2": (turns("<|im_start|>R\n", "<|im_end|>", "\n<|im_start|>assistant\n"), _CHATML_TOKENS),
    "phi-4": (turns("<|im_start|>R<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
              (*_CHATML_TOKENS, "<|im_sep|>")),
    "blocks": (BLOCKS, _CHATML_TOKENS),
    "changes": (CHANGES, _CHATML_TOKENS),
    "llama2": (LLAMA2, _LLAMA2_TOKENS),
    "codellama": (LLAMA2.replace(".strip()", " | trim"), _LLAMA2_TOKENS),
    "llama3": (LLAMA3, _LLAMA3_TOKENS),
    "llama3.1": (LLAMA31, _LLAMA3_TOKENS),
    "llama4": (LLAMA3.replace("start_header_id", "header_start").replace("end_header_id",
               "header_end").replace("eot_id", "eot"),
               ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>")),
    "tulu3": (by_role("<|user|>\n$\n", "<|assistant|>\n$<|endoftext|>\n", "<|system|>\n$\n",
                      "<|assistant|>\n"), ("<|endoftext|>",)),
    "olmo": (by_role("<|user|>\n$\n", "<|assistant|>\n$<|endoftext|>\n", "<|system|>\n$\n",
                     "<|assistant|>\n", first=_BOS), ("<|endoftext|>", "<|user|>")),
    "olmoe": (by_role("<|user|>\n$\n", "<|assistant|>\n$|||IP_ADDRESS|||\n", "<|system|>\n$\n",
                      "<|assistant|>\n", first=_BOS), ("|||IP_ADDRESS|||", "<|endoftext|>")),
    "mistral_v1": (by_role("[INST] $ [/INST]", "$</s>", "[INST] $ [/INST]", "", first=_BOS),
                   _LLAMA2_TOKENS),
    "mistral_v2": (by_role("[INST] $[/INST]", " $</s>", "[INST] $[/INST]", "", first=_BOS),
                   _MISTRAL_TOKENS),
    "mistral_v3": (MISTRAL_V3, _MISTRAL_TOKENS),
    "mistral_tekken": (MISTRAL_V3.replace('"[INST] "', '"[INST]"').replace('" " +', ""),
                       _MISTRAL_TOKENS),
    "mixtral": (by_role("[INST] $ [/INST]", " $</s> ", "$", "", first=_BOS), _LLAMA2_TOKENS),
    "zephyr": (turns("<|R|>\n", "{{ eos_token }}\n", "<|assistant|>\n"), _LLAMA2_TOKENS),
    "tinyllama": (by_role("<|user|>\n$</s>", "<|assistant|>\n$</s>", "<|system|>\n$</s>",
                          "<|assistant|>"), _LLAMA2_TOKENS),
    "stablelm": (turns("<|R|>\n", "<|endoftext|>\n", "<|assistant|>\n"), ("<|endoftext|>",)),
    "gemma": (GEMMA, _GEMMA_TOKENS),
    "gemma3": (GEMMA3, _GEMMA_TOKENS),
    "phi-3": (by_role("<|user|>\n$<|end|>\n", "<|assistant|>\n$<|end|>\n",
                      "<|system|>\n$<|end|>\n", "<|assistant|>\n", first=_BOS), _PHI_TOKENS),
    "phi-3-small": (turns("<|R|>\n", "<|end|>\n", "<|assistant|>\n", first=_BOS), _PHI_TOKENS),
    "phi-4-mini": (PHI4_MINI, (*_PHI_TOKENS, "<|/tool|>")),
    "deepseek_r1": (DEEPSEEK_R1, _DEEPSEEK_TOKENS),
    "deepseek_v2": (by_role("User: $\n\n", "Assistant: $<｜end▁of▁sentence｜>", "$\n\n",
                            "Assistant:", first=_BOS), _DEEPSEEK_TOKENS[:2]),
    "deepseek_coder": (by_role("### Instruction:\n$\n", "### Response:\n$\n<|EOT|>\n", "$",
                               "### Response:", first=_BOS), ("<|EOT|>", "<s>")),
    "granite3": (GRANITE, _GRANITE_TOKENS),
    "granite_code": (by_role("Question:\n$\n\n", "Answer:\n$\n\n", "System:\n$\n\n", "Answer:\n"),
                     ("<|endoftext|>",)),
    "command_r": (COMMAND_R, _COHERE_TOKENS),
    "aya": (COMMAND_R.replace(".strip()", " | trim"), _COHERE_TOKENS),
    "vicuna": (VICUNA, _LLAMA2_TOKENS),
    "alpaca": (by_role("### Instruction:\n$\n\n", "### Response:\n$</s>\n\n", "$\n\n",
                       "### Response:\n", first=_BOS), _LLAMA2_TOKENS),
    "solar": (by_role("### User:\n$\n\n", "### Assistant:\n$\n\n", "### System:\n$\n\n",
                      "### Assistant:\n"), _LLAMA2_TOKENS),
    "openchat": (turns("GPT4 Correct R: ", "<|end_of_turn|>", "GPT4 Correct Assistant:",
                       first=_BOS), ("<s>", "<|end_of_turn|>")),
    "starling": (by_role("GPT4 Correct User: $<|end_of_turn|>",
                         "GPT4 Correct Assistant: $<|end_of_turn|>", "$", "GPT4 Correct Assistant:",
                         first=_BOS), ("<s>", "<|end_of_turn|>")),
    "saiga": (turns("{{ bos_token }}R\n", "{{ eos_token }}", "{{ bos_token }}bot\n"),
              _LLAMA2_TOKENS),
    "falcon": (by_role("User: $\n", "Assistant: $\n", "$\n\n", "Assistant:"), ("<|endoftext|>",)),
    "falcon3": (by_role("<|user|>\n$\n", "<|assistant|>\n$<|endoftext|>\n", "<|system|>\n$\n",
                        "<|assistant|>\n"), ("<|endoftext|>", "<|user|>", "<|assistant|>")),
    "glm4": (turns("<|R|>\n", "", "<|assistant|>", first="[gMASK]<sop>"),
             ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>")),
    "chatglm3": (turns("<|R|>\n ", "", "<|assistant|>"), ("<|user|>", "<|assistant|>")),
    "baichuan": (by_role("<reserved_106>$", "<reserved_107>$</s>", "$", "<reserved_107>"),
                 ("</s>", "<reserved_106>", "<reserved_107>")),
    "minicpm": (by_role("<用户>$", "<AI>$</s>", "$", "<AI>"), _LLAMA2_TOKENS),
    "exaone": (turns("[|R|]", "[|endofturn|]\n", "[|assistant|]"),
               ("[|endofturn|]", "[|user|]", "[|assistant|]", "[|system|]")),
    "nemotron": (by_role("<extra_id_1>User\n$\n", "<extra_id_1>Assistant\n$\n",
                         "<extra_id_0>System\n$\n\n", "<extra_id_1>Assistant\n"),
                 ("<extra_id_0>", "<extra_id_1>")),
    "jamba": (turns("<|bom|><|R|> ", "<|eom|>", "<|bom|><|assistant|>", first=_BOS),
              ("<|startoftext|>", "<|bom|>", "<|eom|>", "<|user|>", "<|assistant|>")),
    "dbrx": (turns("\n<|im_start|>R\n", "<|im_end|>", "\n<|im_start|>assistant\n"), _CHATML_TOKENS),
    "gpt-oss": (GPT_OSS, _HARMONY_TOKENS),
    "kimi": (KIMI, _KIMI_TOKENS),
    "seed": (turns("<seed:bos>R\n", "<seed:eos>", "<seed:bos>assistant\n"),
             ("<seed:bos>", "<seed:eos>")),
    "ernie": (by_role("User: $\n", "Assistant: $<|end_of_sentence|>", "$\n", "Assistant: ",
                      first="<|begin_of_sentence|>"),
              ("<|begin_of_sentence|>", "<|end_of_sentence|>")),
    "json": ("{{ bos_token }}{{ messages | tojson }}{{ eos_token }}", _LLAMA2_TOKENS),
}  # fmt: skip
"""Template and control tokens by family; a beginning and an end that a template names by
`bos_token` and `eos_token` are the first two."""
