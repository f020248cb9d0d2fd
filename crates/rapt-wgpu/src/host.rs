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
use crate::error::GpuError;
use crate::gpu::Gpu;
use crate::staging::{Upload, download};

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

/// Bytes that are gathered before they are handed on.
const GATHERED: usize = 64 << 10;

/// Hands the bytes of a tensor's elements to `take`, row-major, what repeats once; how many there were.
///
/// # Errors
/// [`Error::DeviceUnavailable`] outside host memory; those of `take`.
fn elements(tensor: &'static str, view: &View<'_>, take: &mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<usize> {
    fn of<T: Number, const N: usize>(
        tensor: &'static str,
        view: &View<'_>,
        take: &mut dyn FnMut(usize, &[u8]) -> Result<()>,
        bytes_of: impl Fn(T) -> [u8; N],
    ) -> Result<usize> {
        let lines = view.reinterpreted(tensor, T::DTYPE)?.lines::<T>(tensor)?;
        let (mut gathered, mut taken) = (Vec::with_capacity(GATHERED), 0);
        let mut hand_on = |gathered: &mut Vec<u8>| -> Result<()> {
            take(taken, gathered)?;
            taken += gathered.len();
            gathered.clear();
            Ok(())
        };
        for at in 0..lines.count() {
            let mut line = lines.line(at);
            let mut side_by_side = lines.as_slice(at).unwrap_or_default();
            let mut left = lines.line_len();
            while left > 0 {
                if gathered.len() + N > GATHERED {
                    hand_on(&mut gathered)?;
                }
                let count = left.min((GATHERED - gathered.len()) / N);
                let from = gathered.len();
                gathered.resize(from + count * N, 0);
                let put = |(bytes, x): (&mut [u8], T)| bytes.copy_from_slice(&bytes_of(x));
                let places = gathered[from..].chunks_exact_mut(N);
                match side_by_side.split_at_checked(count) {
                    Some((now, rest)) => {
                        places.zip(now.iter().copied()).for_each(put);
                        side_by_side = rest;
                    }
                    None => places.zip(line.by_ref()).for_each(put),
                }
                left -= count;
            }
        }
        hand_on(&mut gathered)?;
        Ok(taken)
    }
    let mut once = *view;
    for d in 0..view.shape().len() {
        if view.strides()[d] == 0 && view.shape()[d] > 1 {
            once = once.narrow(d, &(0..1));
        }
    }
    match view.dtype().size_bytes() {
        1 => of(tensor, &once, take, u8::to_le_bytes),
        2 => of(tensor, &once, take, u16::to_le_bytes),
        _ => of(tensor, &once, take, u32::to_le_bytes),
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
        let mut on_its_way = Upload::new(&open);
        let mut upload = |name: &'static str, view: &View<'_>, bytes: usize| -> Result<wgpu::Buffer> {
            let buffer = open.buffer(bytes, usage | wgpu::BufferUsages::COPY_DST).map_err(on)?;
            let taken = elements(name, view, &mut |at, bytes| on_its_way.append(&buffer, at, bytes).map_err(on))?;
            on_its_way.end(&buffer, taken).map_err(on)?;
            Ok(buffer)
        };
        let q = upload("q", &tensors.q, packed_bytes(&spec.q))?;
        let k = upload("k", &tensors.k, packed_bytes(&spec.k))?;
        let v = upload("v", &tensors.v, packed_bytes(&spec.v))?;
        let mut optional = |name, view: &Option<View<'_>>, bytes: Option<usize>| {
            view.as_ref().zip(bytes).map(|(view, bytes)| upload(name, view, bytes)).transpose()
        };
        let mask = optional("mask", &tensors.mask, spec.mask.as_ref().map(packed_bytes))?;
        let sinks = optional("sinks", &tensors.sinks, spec.sinks.as_ref().map(packed_bytes))?;
        let slopes = optional("alibi_slopes", &tensors.alibi_slopes, spec.alibi_slopes.as_ref().map(packed_bytes))?;
        on_its_way.finish().map_err(on)?;
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
        let results: Vec<_> = std::iter::once((&out, packed_bytes(&spec.out)))
            .chain(lse.as_ref().zip(spec.lse.as_ref()).map(|(buffer, of)| (buffer, packed_bytes(of))))
            .collect();
        download(&open, &results, |bytes| write(operands, bytes[0], bytes.get(1).copied())).map_err(on)?
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
        let mut upload = Upload::new(&open);
        upload.append(&buffer, 0, bytes).map_err(on)?;
        upload.end(&buffer, bytes.len()).map_err(on)?;
        upload.finish().map_err(on)?;
        Ok(buffer)
    }

    /// The bytes of a buffer with usage `COPY_SRC`, when all that was submitted before has ended.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::DeviceFailed`].
    pub fn download(&self, buffer: &wgpu::Buffer) -> Result<Vec<u8>> {
        let whole = (buffer, buffer.size() as usize);
        download(&*self.opened()?, &[whole], |bytes| bytes[0].to_vec()).map_err(|error| error.on(self.device()))
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
