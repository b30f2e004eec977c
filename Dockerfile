# The first command of the README: docker build -t nsa . && docker run --rm nsa
FROM python:3.11-slim
# The address of an index with CPU builds of torch; without it, pip brings the CUDA build.
ARG PIP_EXTRA_INDEX_URL
WORKDIR /nsa
COPY . .
RUN python3 -m venv .venv && .venv/bin/python -m pip install torch==2.13.0 && .venv/bin/python -m pip install -q ./packages/*
ENV PATH=/nsa/.venv/bin:$PATH
CMD ["sh", "-c", "nsa backends list && nsa verify"]
