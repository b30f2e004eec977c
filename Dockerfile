# The first command of the README: docker build -t nsa . && docker run --rm nsa
FROM python:3.11-slim@sha256:90744cff8f32887f075c47d747a173ff333e9e98801667af93c357fa9f5e28ff
# The address of an index with CPU builds of torch. Without it, pip installs the CUDA build.
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PATH=/nsa/.venv/bin:$PATH
WORKDIR /nsa
COPY packages packages
RUN python3 -m venv --system-site-packages .venv && . .venv/bin/activate && { python -c "import torch" 2>/dev/null || python -m pip install torch==2.13.0; } && python -m pip install -q ./packages/*
RUN useradd --create-home nsa
USER nsa
WORKDIR /home/nsa
CMD ["sh", "-c", "nsa backends list && nsa verify"]
