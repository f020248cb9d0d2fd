//! Tensors of the host: copied to the device, attended to there, and copied back. The plan counts the bytes.
//!
//! ```text
//! q k v mask sinks alibi ──elements, row-major──► buffers ──► run ──► buffers ──elements──► out lse
//! ```
//! Only elements are read and written, never what lies between them. A dimension along which a tensor repeats (stride 0) is copied once.

use rapt_core::{
    Copied, DType, Device, Error, Finite, Number, Offload, Operands, Options, Plan, Result, Shape, Spec, Strides,
    TensorForm, TensorLayout, TensorSpec, View,
};
use rapt_shader::ShaderLaunch;

use crate::buffers::{BufferTensor, BufferTensors};
use crate::device::Open;
use crate::error::GpuError;
use crate::gpu::Gpu;

/// Sizes and strides in the order in which a caller gives them, leading dimensions of 1 included.
fn as_given(of: &TensorSpec<4>, layout: TensorLayout) -> ([usize; 4], [isize; 4]) {
    let (mut shape, mut strides) = (of.shape, of.strides);
    if layout == TensorLayout::Bshd {
        shape.swap(1, 2);
        strides.swap(1, 2);
    }
    (shape, strides)
}

/// The strides of a row-major copy in which what repeats is stored once.
fn packed<const N: usize>(shape: [usize; N], strides: [isize; N]) -> [isize; N] {
    let mut packed = [0; N];
    let mut count = 1isize;
    for d in (0..N).rev() {
        if strides[d] != 0 || shape[d] == 1 {
            packed[d] = count;
            count = count.saturating_mul(shape[d] as isize);
        }
    }
    packed
}

/// Bytes of such a copy.
fn packed_bytes<const N: usize>(of: &TensorSpec<N>) -> usize {
    let once = |(&n, &stride): (&usize, &isize)| if stride == 0 { 1 } else { n };
    of.shape.iter().zip(&of.strides).map(once).product::<usize>().saturating_mul(of.dtype.size_bytes())
}

/// The bytes of a tensor's elements, row-major, what repeats once.
///
/// # Errors
/// [`Error::DeviceUnavailable`] outside host memory.
fn elements(tensor: &'static str, view: &View<'_>) -> Result<Vec<u8>> {
    fn of<T: Number, const N: usize>(
        tensor: &'static str,
        view: &View<'_>,
        bytes_of: impl Fn(T) -> [u8; N],
    ) -> Result<Vec<u8>> {
        let lines = view.reinterpreted(tensor, T::DTYPE)?.lines::<T>(tensor)?;
        let line_bytes = lines.line_len() * N;
        let mut all = vec![0; lines.count() * line_bytes];
        // Of no elements there are no lines to fill.
        for (at, line) in all.chunks_exact_mut(line_bytes.max(1)).enumerate() {
            for (x, bytes) in lines.line(at).zip(line.chunks_exact_mut(N)) {
                bytes.copy_from_slice(&bytes_of(x));
            }
        }
        Ok(all)
    }
    let mut once = *view;
    for d in 0..view.shape().len() {
        if view.strides()[d] == 0 && view.shape()[d] > 1 {
            once = once.narrow(d, &(0..1));
        }
    }
    match view.dtype().size_bytes() {
        1 => of(tensor, &once, u8::to_le_bytes),
        2 => of(tensor, &once, u16::to_le_bytes),
        _ => of(tensor, &once, u32::to_le_bytes),
    }
}

impl Gpu {
    /// What runs for `spec`, whose tensors lie in host memory: copies there and back, and the run between them. `bytes_copied` of its cost
    /// counts both.
    ///
    /// # Errors
    /// As [`Gpu::plan`].
    pub fn plan_host(&self, spec: &Spec) -> Result<Plan> {
        if spec.device != Device::Cpu {
            let why = "copies are made of host memory".to_owned();
            return Err(Error::DeviceUnavailable { device: spec.device, why });
        }
        let on_device = self.plan(&self.device_spec(spec)?)?;
        let of = on_device.spec();
        let tensors = [Some(&of.q), Some(&of.k), Some(&of.v), of.mask.as_ref(), Some(&of.out)];
        let bytes_copied = tensors.into_iter().flatten().map(packed_bytes).sum::<usize>()
            + [of.sinks.as_ref(), of.alibi_slopes.as_ref()].into_iter().flatten().map(packed_bytes).sum::<usize>()
            + of.lse.as_ref().map_or(0, packed_bytes);
        Ok(Copied::plan(spec.clone(), on_device, self.device().to_string(), bytes_copied))
    }

    /// The request of `spec` on row-major copies, in the order of dimensions that it has.
    fn device_spec(&self, spec: &Spec) -> Result<Spec> {
        // What select refuses has forms that a copy does not have.
        rapt_shader::select(spec, self.caps())?;
        let device = self.device();
        let of4 = |of: &TensorSpec<4>, layout| {
            let (shape, strides) = as_given(of, layout);
            TensorForm::new(of.dtype, shape.into(), packed(shape, strides).into(), device)
        };
        let of1 = |of: &TensorSpec<1>| {
            TensorForm::new(of.dtype, of.shape.into(), packed(of.shape, of.strides).into(), device)
        };
        let options = Options {
            softmax_scale: Some(spec.softmax_scale.get()),
            softcap: spec.softcap.map(Finite::get),
            causal: spec.causal,
            window: spec.window,
            layout: spec.layout,
            out_dtype: Some(spec.out.dtype),
            compute: spec.compute,
            dropout_p: 0.0,
        };
        let [q, k, v] = [&spec.q, &spec.k, &spec.v].map(|of| of4(of, spec.layout));
        let mut builder = Spec::builder(q, k, v, &options);
        builder
            .mask(spec.mask.as_ref().map(|mask| of4(mask, TensorLayout::Bhsd)))
            .sinks(spec.sinks.as_ref().map(of1))
            .alibi_slopes(spec.alibi_slopes.as_ref().map(of1))
            .return_lse(spec.lse.is_some());
        builder.build()
    }

    /// Runs `plan`, which [`Gpu::plan_host`] made; `out` and `lse` are written when it returns.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] for operands of another spec; [`Error::OutOfMemory`] where the device has no room for the copies;
    /// [`Error::DeviceFailed`]. Before the result has arrived nothing is written.
    pub fn run_host(&self, plan: &Plan, operands: &mut Operands<'_>) -> Result<()> {
        let launch = plan.launch_plan::<Copied>()?;
        operands.expect(plan.spec())?;
        let open = self.opened()?;
        let on = |error: GpuError| error.on(self.device());
        let spec = launch.on_copies().spec();
        if spec.out.shape.contains(&0) {
            return Ok(());
        }
        let usage = wgpu::BufferUsages::STORAGE;
        let tensors = operands.tensors();
        let upload = |name: &'static str, view: &View<'_>| -> Result<wgpu::Buffer> {
            let mut bytes = elements(name, view)?;
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            let buffer = open.buffer(bytes.len(), usage | wgpu::BufferUsages::COPY_DST).map_err(on)?;
            open.guarded("write_buffer", bytes.len(), || open.queue.write_buffer(&buffer, 0, &bytes)).map_err(on)?;
            Ok(buffer)
        };
        let optional = |name, view: &Option<View<'_>>| view.as_ref().map(|view| upload(name, view)).transpose();
        let (q, k, v) = (upload("q", &tensors.q)?, upload("k", &tensors.k)?, upload("v", &tensors.v)?);
        let mask = optional("mask", &tensors.mask)?;
        let (sinks, slopes) = (optional("sinks", &tensors.sinks)?, optional("alibi_slopes", &tensors.alibi_slopes)?);
        let result = |bytes| open.buffer(bytes, usage | wgpu::BufferUsages::COPY_SRC).map_err(on);
        let out = result(packed_bytes(&spec.out))?;
        let lse = spec.lse.as_ref().map(|of| result(packed_bytes(of))).transpose()?;

        let of4 = |buffer, of: &TensorSpec<4>, layout| {
            let (shape, strides) = as_given(of, layout);
            in_buffer(buffer, of.dtype, shape.into(), strides.into())
        };
        let of1 = |buffer, of: &TensorSpec<1>| in_buffer(buffer, of.dtype, of.shape.into(), of.strides.into());
        let of_spec = |buffer, of| of4(buffer, of, spec.layout);
        let on_device = BufferTensors {
            mask: mask.as_ref().zip(spec.mask.as_ref()).map(|(buffer, of)| of4(buffer, of, TensorLayout::Bhsd)),
            sinks: sinks.as_ref().zip(spec.sinks.as_ref()).map(|(buffer, of)| of1(buffer, of)),
            alibi_slopes: slopes.as_ref().zip(spec.alibi_slopes.as_ref()).map(|(buffer, of)| of1(buffer, of)),
            lse: lse
                .as_ref()
                .zip(spec.lse)
                .map(|(buffer, of)| in_buffer(buffer, of.dtype, of.shape.into(), of.strides.into())),
            ..BufferTensors::new(
                of_spec(&q, &spec.q),
                of_spec(&k, &spec.k),
                of_spec(&v, &spec.v),
                of_spec(&out, &spec.out),
            )
        };
        let proven = Operands::check(on_device.views(self.device())?, spec)?;
        crate::launch::submit(
            &open,
            launch.on_copies().launch_plan::<ShaderLaunch>()?,
            &proven,
            spec,
            &on_device,
            None,
        )?;
        let out = download(&open, &out, packed_bytes(&spec.out)).map_err(on)?;
        let lse = lse.map(|lse| download(&open, &lse, lse.size() as usize)).transpose().map_err(on)?;
        write(operands, &out, lse.as_deref())
    }
}

impl Gpu {
    /// A buffer of these bytes and up to three of 0 behind them, which kernels may read and write.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::DeviceFailed`].
    pub fn upload(&self, bytes: &[u8]) -> Result<wgpu::Buffer> {
        use wgpu::BufferUsages as Usages;
        let (open, on) = (self.opened()?, |error: GpuError| error.on(self.device()));
        let usage = Usages::STORAGE | Usages::COPY_DST | Usages::COPY_SRC;
        let buffer = open.buffer(bytes.len(), usage).map_err(on)?;
        let whole = bytes.len() / 4 * 4;
        let mut rest = bytes[whole..].to_vec();
        rest.resize(rest.len().next_multiple_of(4), 0);
        open.guarded("write_buffer", bytes.len(), || {
            open.queue.write_buffer(&buffer, 0, &bytes[..whole]);
            open.queue.write_buffer(&buffer, whole as u64, &rest);
        })
        .map_err(on)?;
        Ok(buffer)
    }

    /// The bytes of a buffer with usage `COPY_SRC`, when all that was submitted before has ended.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::DeviceFailed`].
    pub fn download(&self, buffer: &wgpu::Buffer) -> Result<Vec<u8>> {
        download(&*self.opened()?, buffer, buffer.size() as usize).map_err(|error| error.on(self.device()))
    }
}

impl Offload for Gpu {
    fn device(&self) -> Device {
        Gpu::device(self)
    }
    fn plan_host(&self, spec: &Spec) -> Result<Plan> {
        Gpu::plan_host(self, spec)
    }
    fn is_planned_here(&self, plan: &Plan) -> bool {
        plan.launch_plan::<Copied>().is_ok()
    }
    fn run_host(&self, plan: &Plan, operands: &mut Operands<'_>) -> Result<()> {
        Gpu::run_host(self, plan, operands)
    }
}

fn in_buffer(buffer: &wgpu::Buffer, dtype: DType, shape: Shape, strides: Strides) -> BufferTensor<'_> {
    BufferTensor { buffer, offset_bytes: 0, dtype, shape, strides }
}

/// The first `bytes` of a buffer, when all that was submitted before has ended.
pub(crate) fn download(open: &Open, buffer: &wgpu::Buffer, bytes: usize) -> crate::error::Result<Vec<u8>> {
    let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
    let staging = open.buffer(bytes, usage)?;
    open.guarded("copy_buffer_to_buffer", bytes, || {
        let mut encoder = open.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("rapt") });
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, staging.size());
        open.queue.submit([encoder.finish()]);
    })?;
    let failed = |why: String| open.lost().unwrap_or(GpuError::Failed { call: "map_async", why });
    let (sender, mapped) = std::sync::mpsc::channel();
    open.guarded("map_async", bytes, || {
        staging.slice(..).map_async(wgpu::MapMode::Read, move |answer| drop(sender.send(answer)));
        open.device.poll(wgpu::PollType::wait_indefinitely())
    })?
    .map_err(|error| failed(error.to_string()))?;
    match mapped.recv() {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(failed(error.to_string())),
        Err(error) => return Err(failed(error.to_string())),
    }
    let view = staging.slice(..).get_mapped_range().map_err(|error| failed(error.to_string()))?;
    let mut bytes_read = view.to_vec();
    bytes_read.truncate(bytes);
    Ok(bytes_read)
}

/// Writes row-major elements to `out` and `lse`, as they lie.
fn write(operands: &mut Operands<'_>, out: &[u8], lse: Option<&[u8]>) -> Result<()> {
    let last = |shape: &Shape| shape.last().copied().unwrap_or(1).max(1);
    let (len, size) = (last(operands.tensors().out.shape()), operands.tensors().out.dtype().size_bytes());
    for (line, row) in out.chunks_exact(len * size).enumerate() {
        match size {
            2 => operands.write_out_line(line, row.chunks_exact(2).map(|x| u16::from_le_bytes([x[0], x[1]])))?,
            _ => operands.write_out_line(line, words(row))?,
        }
    }
    let (Some(lse), Some(of)) = (lse, &operands.tensors().lse) else { return Ok(()) };
    let len = last(of.shape());
    lse.chunks_exact(len * 4).enumerate().try_for_each(|(line, row)| operands.write_lse_line(line, words(row)))
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks_exact(4).map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]]))
}
