/**
 * A GPU of the page: its pipelines, and the dispatches of a request.
 *
 * WebGPU tells errors by scopes and promises; `Guarded` makes a `RaptError` of them.
 */

import { RaptError } from "./errors.js";
import type { Module, OnGpu, Pipeline } from "./wasm.js";

/** What the module reads of a device. */
export interface DeviceLimits {
  max_binding_bytes: number;
  offset_alignment: number;
  max_groups: number;
  max_threads: number;
  max_shared_bytes: number;
}

// GPUBufferUsage and GPUMapMode by value: Node has no such globals.
export const MAP_READ = 0x1;
export const COPY_SRC = 0x4;
export const COPY_DST = 0x8;
export const STORAGE = 0x80;
const QUERY_RESOLVE = 0x200;
const COMPUTE = 0x4;

/** Storage buffers of a kernel: parameters and eight tensors. */
const BUFFERS = 9;

/** Limits that the kernels use beyond those that every device has, as far as `adapter` has them: what `requestDevice` takes. */
export function requiredLimits(adapter: GPUAdapter): Record<string, number> {
  const { limits } = adapter;
  return {
    maxStorageBuffersPerShaderStage: Math.min(limits.maxStorageBuffersPerShaderStage, 10),
    maxStorageBufferBindingSize: limits.maxStorageBufferBindingSize,
    maxBufferSize: limits.maxBufferSize,
    maxComputeWorkgroupStorageSize: limits.maxComputeWorkgroupStorageSize,
  };
}

/** What an adapter offers, and what the kernels could use and it lacks. */
export interface AdapterReport {
  name: string;
  vendor: string;
  architecture: string;
  limits: Record<string, number>;
  features: string[];
  lacks: string[];
}

const REPORTED = [
  "maxStorageBuffersPerShaderStage",
  "maxStorageBufferBindingSize",
  "maxBufferSize",
  "maxComputeWorkgroupStorageSize",
  "maxComputeInvocationsPerWorkgroup",
  "minStorageBufferOffsetAlignment",
] as const;

export function report(adapter: GPUAdapter): AdapterReport {
  const { info, limits } = adapter;
  const features = [...adapter.features].sort();
  const lacks = [
    ["timestamp-query", "timestamps (times are those of the page's clock)"],
    ["shader-f16", "16-bit arithmetic"],
    ["subgroups", "subgroup operations"],
  ].filter(([feature]) => !features.includes(feature!));
  return {
    name: info.description || info.device || info.architecture || info.vendor || "unnamed",
    vendor: info.vendor,
    architecture: info.architecture,
    limits: Object.fromEntries(REPORTED.map((name) => [name, limits[name]])),
    features,
    lacks: ["16-bit stores (two atomic operations stand in)", ...lacks.map(([, what]) => what!)],
  };
}

function unavailable(why: string, hint = '`device: "wasm"`'): RaptError {
  return new RaptError("DeviceError", `webgpu is not available: ${why}`, hint);
}

async function anAdapter(): Promise<GPUAdapter> {
  const gpu = typeof navigator === "undefined" ? undefined : navigator.gpu;
  if (!gpu) throw unavailable("this page or program has no navigator.gpu");
  const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw unavailable("the system shows no adapter");
  return adapter;
}

/** What the page's adapter offers. */
export async function adapter(): Promise<AdapterReport> {
  return report(await anAdapter());
}

let page: Promise<Gpu> | undefined;

/** The page's own GPU, opened; anew where it was lost. */
export function ofPage(): Promise<Gpu> {
  page ??= open().catch((error: unknown) => {
    page = undefined;
    throw error;
  });
  return page;
}

async function open(): Promise<Gpu> {
  const adapter = await anAdapter();
  const features = (["timestamp-query"] as GPUFeatureName[]).filter((feature) => adapter.features.has(feature));
  let device: GPUDevice;
  try {
    device = await adapter.requestDevice({ label: "rapt", requiredFeatures: features, requiredLimits: requiredLimits(adapter) });
  } catch (error) {
    throw unavailable((error as Error).message);
  }
  void device.lost.then(() => {
    page = undefined;
  });
  return Gpu.of(device);
}

interface Compiled {
  pipeline: GPUComputePipeline;
  layout: GPUBindGroupLayout;
}

const open_devices = new WeakMap<GPUDevice, Gpu>();

/** A device with what was compiled for it. */
export class Gpu {
  private readonly pipelines = new Map<string, Promise<Compiled>>();
  private readonly unused: [GPUBuffer, GPUBuffer, GPUBuffer];
  private lost: string | undefined;

  private constructor(readonly device: GPUDevice) {
    void device.lost.then((info) => {
      this.lost = `${info.reason}: ${info.message}`;
    });
    const buffer = () => device.createBuffer({ label: "rapt", size: 16, usage: STORAGE });
    this.unused = [buffer(), buffer(), buffer()];
  }

  static of(device: GPUDevice): Gpu {
    let gpu = open_devices.get(device);
    if (!gpu) {
      const { limits } = device;
      const needs: [string, number, number][] = [
        ["threads of a workgroup", limits.maxComputeInvocationsPerWorkgroup, 256],
        ["bytes of workgroup memory", limits.maxComputeWorkgroupStorageSize, 16_384],
        ["storage buffers of a stage", limits.maxStorageBuffersPerShaderStage, BUFFERS],
      ];
      const lacking = needs.find(([, has, needed]) => has < needed);
      if (lacking) {
        const [what, has, needed] = lacking;
        throw unavailable(`the kernels need ${needed} ${what}, the device has ${has}`, "`adapter.requestDevice({ requiredLimits: requiredLimits(adapter) })`");
      }
      gpu = new Gpu(device);
      open_devices.set(device, gpu);
    }
    return gpu;
  }

  limits(): DeviceLimits {
    const { limits } = this.device;
    return {
      max_binding_bytes: limits.maxStorageBufferBindingSize,
      offset_alignment: limits.minStorageBufferOffsetAlignment,
      max_groups: limits.maxComputeWorkgroupsPerDimension,
      max_threads: Math.min(limits.maxComputeInvocationsPerWorkgroup, limits.maxComputeWorkgroupSizeX),
      max_shared_bytes: limits.maxComputeWorkgroupStorageSize,
    };
  }

  /** `calls`, made in one go, and what WebGPU says of them later. */
  private guarded<T>(call: string, calls: () => T): Guarded<T> {
    const { device } = this;
    for (const filter of ["out-of-memory", "internal", "validation"] as const) device.pushErrorScope(filter);
    let done: T | undefined;
    let thrown: unknown;
    try {
      done = calls();
    } catch (error) {
      thrown = error;
    }
    const scopes = [device.popErrorScope(), device.popErrorScope(), device.popErrorScope()];
    const checked = Promise.all(scopes).then(([validation, internal, memory]) => {
      if (this.lost !== undefined) throw this.failure(call, "");
      if (memory || thrown instanceof RangeError) throw new RaptError("DeviceError", `the device has no memory left for ${call}`, '`device: "wasm"`');
      if (thrown !== undefined) throw thrown;
      const error = validation ?? internal;
      if (error) throw this.failure(call, error.message);
    });
    // Whoever awaits it is told; nobody need.
    checked.catch(() => undefined);
    return { done: done as T, checked, failed: thrown !== undefined };
  }

  private failure(call: string, why: string): RaptError {
    const words = this.lost === undefined ? `${call}: ${why}` : `the device is lost: ${this.lost}`;
    return new RaptError("DeviceError", `webgpu failed: ${words}`, "the same call, which opens the page's GPU anew if it was lost, or `device: \"wasm\"`");
  }

  /** A buffer of whole words, filled with `bytes` where they are given. */
  private create(len: number, usage: number, bytes?: Uint8Array<ArrayBufferLike>): GPUBuffer {
    const size = Math.max(4, Math.ceil(len / 4) * 4);
    if (size > this.device.limits.maxBufferSize) {
      throw new RaptError("DeviceError", `a buffer of ${size} bytes; the device has at most ${this.device.limits.maxBufferSize}`, '`device: "wasm"`, or fewer heads at a time');
    }
    const buffer = this.device.createBuffer({ label: "rapt", size, usage, mappedAtCreation: bytes !== undefined });
    if (bytes !== undefined) {
      new Uint8Array(buffer.getMappedRange()).set(bytes);
      buffer.unmap();
    }
    return buffer;
  }

  /** A buffer for a result that stays on the device. */
  async output(len: number): Promise<GPUBuffer> {
    const created = this.guarded("createBuffer", () => this.create(len, STORAGE | COPY_SRC | COPY_DST));
    await created.checked;
    return created.done;
  }

  private pipeline(module: Module, kernel: Pipeline): Promise<Compiled> {
    let compiled = this.pipelines.get(kernel.name);
    if (!compiled) {
      compiled = this.compile(kernel, module.source(kernel.name));
      compiled.catch(() => this.pipelines.delete(kernel.name));
      this.pipelines.set(kernel.name, compiled);
    }
    return compiled;
  }

  /** The pipeline of a kernel, compiled. */
  async compile(kernel: Pipeline, code: string): Promise<Compiled> {
    const entry = (binding: number, is_output: boolean): GPUBindGroupLayoutEntry => ({
      binding,
      visibility: COMPUTE,
      buffer: { type: is_output ? "storage" : "read-only-storage" },
    });
    const entries = [entry(0, false), ...kernel.bindings.map(([index, , is_output]) => entry(index, is_output))];
    const created = this.guarded(kernel.name, () => {
      const layout = this.device.createBindGroupLayout({ label: "rapt", entries });
      const module = this.device.createShaderModule({ label: kernel.name, code });
      const whole = this.device.createPipelineLayout({ bindGroupLayouts: [layout] });
      const compute = { module, entryPoint: kernel.entry };
      return { layout, pipeline: this.device.createComputePipelineAsync({ label: kernel.name, layout: whole, compute }) };
    });
    created.done?.pipeline.catch(() => undefined);
    await created.checked;
    try {
      return { layout: created.done.layout, pipeline: await created.done.pipeline };
    } catch (error) {
      throw this.failure(kernel.name, (error as Error).message);
    }
  }

  /** Submits the dispatches of a request; answers the seconds that they took where it is asked to time them. */
  async run(module: Module, work: OnGpu, buffers: Record<string, GPUBuffer>, timing: boolean): Promise<Timing | undefined> {
    if (this.lost !== undefined) throw this.failure("submit", "");
    const kernels = await Promise.all(work.kernels.map((kernel) => this.pipeline(module, kernel)));
    const timed = timing && this.device.features.has("timestamp-query");
    const begin = performance.now();
    const submitted = this.guarded("submit", () => this.submit(work, kernels, buffers, timed));
    await submitted.checked;
    const { own, stamps } = submitted.done;
    try {
      if (stamps) {
        await stamps.mapAsync(MAP_READ);
        const [first, last] = new BigUint64Array(stamps.getMappedRange());
        return { seconds: Number(last! - first!) * 1e-9, clock: "timestamps" };
      }
      if (!timing) return undefined;
      await this.device.queue.onSubmittedWorkDone();
      return { seconds: (performance.now() - begin) * 1e-3, clock: "page" };
    } finally {
      // What is destroyed is kept until the work before has ended.
      for (const buffer of own) buffer.destroy();
      stamps?.destroy();
    }
  }

  private submit(work: OnGpu, kernels: Compiled[], buffers: Record<string, GPUBuffer>, timed: boolean): Submitted {
    const { device } = this;
    const own: GPUBuffer[] = [];
    const keep = (buffer: GPUBuffer) => {
      own.push(buffer);
      return buffer;
    };
    const partials = work.workspace_bytes > 0 ? keep(this.create(work.workspace_bytes, STORAGE)) : undefined;
    const queries = timed ? device.createQuerySet({ type: "timestamp", count: 2 }) : undefined;
    const encoder = device.createCommandEncoder({ label: "rapt" });
    const stamps = queries && { timestampWrites: { querySet: queries, beginningOfPassWriteIndex: 0, endOfPassWriteIndex: 1 } };
    const pass = encoder.beginComputePass({ label: "rapt", ...stamps });
    for (const { ranges, params, groups } of work.windows) {
      const words = keep(this.create(4 * params.length, STORAGE, new Uint8Array(new Uint32Array(params).buffer)));
      const bound = (tensor: string): GPUBufferBinding => {
        const range = ranges[tensor];
        const buffer = buffers[tensor];
        if (tensor === "partials" && partials) return { buffer: partials };
        if (range && buffer) return { buffer, offset: range[0], size: range[1] };
        return { buffer: this.unused[tensor === "out" ? 1 : tensor === "lse" ? 2 : 0] };
      };
      work.kernels.forEach((kernel, at) => {
        const { layout, pipeline } = kernels[at]!;
        const [x, y] = groups[at]!;
        const entries = kernel.bindings.map(([binding, tensor]) => ({ binding, resource: bound(tensor) }));
        const group = device.createBindGroup({ label: "rapt", layout, entries: [{ binding: 0, resource: { buffer: words } }, ...entries] });
        pass.setPipeline(pipeline);
        pass.setBindGroup(0, group);
        pass.dispatchWorkgroups(x, y);
      });
    }
    pass.end();
    let read: GPUBuffer | undefined;
    if (queries) {
      const resolved = keep(this.create(16, QUERY_RESOLVE | COPY_SRC));
      read = this.create(16, MAP_READ | COPY_DST);
      encoder.resolveQuerySet(queries, 0, 2, resolved, 0);
      encoder.copyBufferToBuffer(resolved, 0, read, 0, 16);
    }
    device.queue.submit([encoder.finish()]);
    return { own, stamps: read };
  }

  /** As `run`, of tensors of the host, which are copied there; out and lse are answered as bytes. */
  async onHost(module: Module, work: OnGpu, inputs: Record<string, Uint8Array<ArrayBufferLike>>, outputs: Record<string, number>, timing: boolean): Promise<{ bytes: Record<string, ArrayBuffer>; timing: Timing | undefined }> {
    const created: GPUBuffer[] = [];
    const keep = (buffer: GPUBuffer) => {
      created.push(buffer);
      return buffer;
    };
    const copied = this.guarded("copies of the tensors", () => {
      const uploaded = Object.entries(inputs).map(([name, bytes]) => [name, keep(this.create(bytes.length, STORAGE, bytes))]);
      const results = Object.entries(outputs).map(([name, len]) => [name, keep(this.create(len, STORAGE | COPY_SRC))]);
      return Object.fromEntries([...uploaded, ...results]) as Record<string, GPUBuffer>;
    });
    try {
      await copied.checked;
      const timed = await this.run(module, work, copied.done, timing);
      const bytes: Record<string, ArrayBuffer> = {};
      for (const [name, len] of Object.entries(outputs)) bytes[name] = await this.read(copied.done[name]!, len);
      return { bytes, timing: timed };
    } finally {
      for (const buffer of created) buffer.destroy();
    }
  }

  /** The first bytes of a buffer, when all that was submitted before has ended. */
  private async read(buffer: GPUBuffer, len: number): Promise<ArrayBuffer> {
    const read = this.guarded("copyBufferToBuffer", () => {
      const staging = this.create(buffer.size, MAP_READ | COPY_DST);
      const encoder = this.device.createCommandEncoder({ label: "rapt" });
      encoder.copyBufferToBuffer(buffer, 0, staging, 0, buffer.size);
      this.device.queue.submit([encoder.finish()]);
      return staging;
    });
    await read.checked;
    try {
      await read.done.mapAsync(MAP_READ);
      return read.done.getMappedRange().slice(0, len);
    } catch (error) {
      throw this.failure("mapAsync", (error as Error).message);
    } finally {
      read.done.destroy();
    }
  }
}

interface Guarded<T> {
  done: T;
  checked: Promise<void>;
  failed: boolean;
}

interface Submitted {
  own: GPUBuffer[];
  stamps: GPUBuffer | undefined;
}

/** How long the dispatches took, by the GPU's timestamps or by the page's clock from submission to their end. */
export interface Timing {
  seconds: number;
  clock: "timestamps" | "page";
}
