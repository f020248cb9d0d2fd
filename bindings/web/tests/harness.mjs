// The host of suite.wasm: it gives the package tensors with bands of a pattern around their memory, and looks at every byte afterwards.
// In a browser and in Node alike; `rapt` is the package.

const BAND = 512;
const PATTERN = 0xff;
const STORAGE = 0x80 | 0x4 | 0x8; // STORAGE | COPY_SRC | COPY_DST
const ARRAYS = { float64: Float64Array, float32: Float32Array, float16: Uint16Array, bfloat16: Uint16Array, bool: Uint8Array };
const SIZES = { float64: 8, float32: 4, float16: 2, bfloat16: 2, bool: 1 };
const NAMES = ["q", "k", "v", "mask", "sinks", "alibi_slopes", "out"];

function equal(a, b, from, to) {
  for (let at = from; at < to; at++) if (a[at] !== b[at]) return false;
  return true;
}

export class Harness {
  /** `gpu`: a GPUDevice, for the engine of buffers. */
  constructor(rapt, gpu) {
    Object.assign(this, { rapt, gpu, calls: 0, copied: 0, kernels: {} });
  }

  /** The memory of a tensor in an array of its own, between bands. */
  placed(tensor) {
    const { address, len, dtype } = tensor;
    const begin = BAND + (address % 64);
    const bytes = new Uint8Array(Math.ceil((begin + len + BAND) / 4) * 4).fill(PATTERN);
    bytes.set(new Uint8Array(this.memory.buffer, address, len), begin);
    return { ...tensor, begin, bytes, before: bytes.slice(), size: SIZES[dtype] };
  }

  read(address, len) {
    const request = JSON.parse(new TextDecoder().decode(new Uint8Array(this.memory.buffer, address, len).slice()));
    const placed = Object.fromEntries(NAMES.filter((name) => request[name]).map((name) => [name, this.placed(request[name])]));
    return { request, placed };
  }

  arrays(placed) {
    const tensor = ({ bytes, begin, len, dtype, size, shape, strides, offset }) => ({
      data: new ARRAYS[dtype](bytes.buffer, begin, len / size), dtype, shape, strides, offset,
    });
    return Object.fromEntries(Object.entries(placed).map(([name, of]) => [name, tensor(of)]));
  }

  /** Looks at every byte, and takes the memory of out and lse back. */
  finish(request, placed, result, lse) {
    this.calls++;
    this.copied += result.plan.bytes_copied;
    this.kernels[result.plan.kernel] = (this.kernels[result.plan.kernel] ?? 0) + 1;
    for (const [name, { bytes, before, begin, len }] of Object.entries(placed)) {
      const [from, to] = name === "out" ? [begin, begin + len] : [begin, begin];
      if (!equal(bytes, before, 0, from) || !equal(bytes, before, to, bytes.length)) {
        throw new Error(`${name}: a byte of it or beside it changed: ${JSON.stringify(request)}`);
      }
    }
    const { out } = placed;
    new Uint8Array(this.memory.buffer, out.address, out.len).set(out.bytes.subarray(out.begin, out.begin + out.len));
    if (lse) new Uint8Array(this.memory.buffer, request.lse_into, request.lse_bytes).set(lse);
    return 0;
  }

  unserved(error) {
    if (error instanceof this.rapt.RaptError && error.code === "UnsupportedError" && !error.message.includes("defect")) return 1;
    throw error;
  }

  bytesOf(array) {
    return array && new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  }

  sync(address, len) {
    const { request, placed } = this.read(address, len);
    const { q, k, v, ...rest } = this.arrays(placed);
    try {
      const result = this.rapt.attentionSync(q, k, v, { ...request.options, ...rest });
      return this.finish(request, placed, result, this.bytesOf(result.lse?.data));
    } catch (error) {
      return this.unserved(error);
    }
  }

  async async(address, len) {
    const { request, placed } = this.read(address, len);
    try {
      return await (request.device === "buffers" ? this.inBuffers(request, placed) : this.onHost(request, placed));
    } catch (error) {
      return this.unserved(error);
    }
  }

  async onHost(request, placed) {
    const { q, k, v, ...rest } = this.arrays(placed);
    const device = request.device === "webgpu" ? (this.gpu ?? "webgpu") : request.device;
    const result = await this.rapt.attention(q, k, v, { ...request.options, ...rest, device });
    return this.finish(request, placed, result, this.bytesOf(result.lse?.data));
  }

  async inBuffers(request, placed) {
    const created = [];
    const tensor = ({ bytes, begin, dtype, size, shape, strides, offset }) => {
      const data = this.gpu.createBuffer({ size: bytes.length, usage: STORAGE });
      created.push(data);
      this.gpu.queue.writeBuffer(data, 0, bytes);
      return { data, dtype, shape, strides, offset: offset + begin / size };
    };
    const { q, k, v, ...rest } = Object.fromEntries(Object.entries(placed).map(([name, of]) => [name, tensor(of)]));
    try {
      const result = await this.rapt.attention(q, k, v, { ...request.options, ...rest, device: this.gpu });
      const all = [...Object.keys(placed).map((name) => ({ q, k, v, ...rest })[name].data), ...(result.lse ? [result.lse.data] : [])];
      const bytes = await this.download(all);
      Object.values(placed).forEach((of, at) => (of.bytes = bytes[at]));
      if (result.lse) created.push(result.lse.data);
      const lse = result.lse && bytes.at(-1).subarray(0, request.lse_bytes);
      return this.finish(request, placed, result, lse);
    } finally {
      for (const buffer of created) buffer.destroy();
    }
  }

  async download(buffers) {
    const size = buffers.reduce((sum, buffer) => sum + buffer.size, 0);
    const staging = this.gpu.createBuffer({ size, usage: 0x1 | 0x8 });
    const encoder = this.gpu.createCommandEncoder();
    let at = 0;
    for (const buffer of buffers) {
      encoder.copyBufferToBuffer(buffer, 0, staging, at, buffer.size);
      at += buffer.size;
    }
    this.gpu.queue.submit([encoder.finish()]);
    await staging.mapAsync(0x1);
    const all = new Uint8Array(staging.getMappedRange().slice(0));
    staging.destroy();
    at = 0;
    return buffers.map((buffer) => all.subarray(at, (at += buffer.size)));
  }

  /** Runs the suite, at once. */
  runSync(compiled, ...numbers) {
    const { exports } = new WebAssembly.Instance(compiled, { env: { attend: (address, len) => this.sync(address, len) } });
    this.memory = exports.memory;
    return this.text(exports.suite_run(...numbers));
  }

  /** Runs the suite where `attend` waits for promises. */
  async run(compiled, ...numbers) {
    const attend = new WebAssembly.Suspending((address, len) => this.async(address, len));
    const { exports } = new WebAssembly.Instance(compiled, { env: { attend } });
    this.memory = exports.memory;
    return this.text(await WebAssembly.promising(exports.suite_run)(...numbers));
  }

  text(packed) {
    const bytes = new Uint8Array(this.memory.buffer, Number((packed >> 32n) & 0xffffffffn), Number(packed & 0xffffffffn));
    return new TextDecoder().decode(bytes.slice());
  }
}
