// Dawn, the WebGPU of Chromium, compiles the text of every kernel: node dawn.mjs <the package's folder>
import { create, globals } from "webgpu";
import { pathToFileURL } from "node:url";

Object.assign(globalThis, globals);
const rapt = await import(pathToFileURL(`${process.argv[2]}/index.js`));
const gpu = create([]);
const adapter = await gpu.requestAdapter();
if (!adapter) throw new Error("Dawn shows no adapter");
const limits = { ...rapt.requiredLimits(adapter) };
const device = await adapter.requestDevice({ requiredLimits: limits });
console.log(`Dawn on ${adapter.info.description || adapter.info.device || adapter.info.vendor}`);
// `enable wgpu_int16` is wgpu's own: Dawn does not know the word, and no browser asks for these texts.
const OF_WGPU = "enable wgpu_int16;";
const counts = { compiled: 0, "of wgpu alone": 0 };
const findings = [];
for (const name of await rapt.kernels()) {
  const code = await rapt.source(name);
  device.pushErrorScope("validation");
  const { messages } = await device.createShaderModule({ code }).getCompilationInfo();
  const error = await device.popErrorScope();
  const errors = messages.filter(({ type }) => type === "error").map(({ lineNum, message }) => `${lineNum}: ${message}`);
  const is_refused = error !== null || errors.length > 0;
  const is_of_wgpu = code.includes(OF_WGPU);
  if (is_refused !== is_of_wgpu || (is_of_wgpu && !errors.every((line) => line.startsWith("2: expected extension")))) {
    findings.push(`${name}: ${errors.join("; ") || error?.message || "compiled"}`);
  }
  counts[is_of_wgpu ? "of wgpu alone" : "compiled"]++;
}
console.log(JSON.stringify(counts));
for (const finding of findings) console.log(finding);
if (counts.compiled < 100) throw new Error("there are more kernels than these");
process.exit(findings.length === 0 ? 0 : 1);
