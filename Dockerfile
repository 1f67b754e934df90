# syntax=docker/dockerfile:1
# docker build --target router     -t carryback-router .      the router: no vLLM, no GPU
# docker build --target engine     -t carryback-engine .      an engine on NVIDIA GPUs: vLLM's image and the plug-in
# docker build --target engine-cpu -t carryback-engine-cpu .  an engine on a CPU, with the small default model
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
# One of vLLM's that has NIXL. For EFA, one that has libfabric, too.
ARG ENGINE_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY sdk sdk
COPY server server
COPY integrations integrations
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS python
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/home/carryback
COPY deploy/docker/health.py /opt/carryback/health.py
# The folder is there so that a volume in its place is the user's, too.
RUN useradd --uid 10001 --create-home carryback \
    && install --directory --owner=carryback /home/carryback/.cache /home/carryback/.cache/huggingface

FROM python AS router
# The versions that the tests run with.
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    --mount=source=requirements/cpu.txt,target=/constraints.txt \
    pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[server,redis,otel]"
USER 10001:10001
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=10s --start-period=10s CMD ["python3", "/opt/carryback/health.py", "8000"]
ENTRYPOINT ["carryback"]
CMD ["router", "--host", "0.0.0.0"]

FROM python AS engine-cpu
# Exact pins, and nothing that they ask for: see the file.
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    --mount=source=requirements/cpu.txt,target=/requirements.txt \
    pip install --no-cache-dir --no-deps --requirement /requirements.txt /wheels/*.whl
USER 10001:10001
EXPOSE 8100-8102 8200-8202
HEALTHCHECK --interval=15s --timeout=10s --start-period=5m CMD ["python3", "/opt/carryback/health.py", "8100", "8200"]
ENTRYPOINT ["carryback"]
CMD ["engine", "--help"]

FROM ${ENGINE_IMAGE} AS engine
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY deploy/docker/health.py /opt/carryback/health.py
# What the image has stays as it is: vLLM was built and tested with it.
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    python3 -m pip freeze | grep -E '^[A-Za-z0-9._-]+==' > /tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheels/*.whl)[server,redis,otel]" \
    && rm /tmp/constraints.txt \
    && python3 -c "import nixl, carryback_vllm" \
    && useradd --uid 10001 --create-home carryback \
    && install --directory --owner=carryback /home/carryback/.cache /home/carryback/.cache/huggingface
ENV PYTHONUNBUFFERED=1 HOME=/home/carryback
USER 10001:10001
EXPOSE 8100-8102 8200-8202
HEALTHCHECK --interval=15s --timeout=10s --start-period=60m CMD ["python3", "/opt/carryback/health.py", "8100", "8200"]
ENTRYPOINT ["carryback"]
CMD ["engine", "--help"]
