//! The backward pass of the engine: planned, proven and run as attention is.

use rapt_core::{
    BackwardOperands, BackwardPlan, BackwardSpec, BackwardTensors, Caps, Device, DeviceMemory, Error, GradientForms,
    Options, Queue, Result, Spec, TensorForm, View, ViewMut,
};

use crate::Engine;

impl Engine {
    /// What will run for the gradients of `spec`: on this engine's own threads, or on the NVIDIA GPU where the tensors lie.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with what to do instead; [`Error::DeviceUnavailable`] for memory of neither.
    pub fn plan_backward(&self, spec: &BackwardSpec) -> Result<BackwardPlan> {
        self.plan_backward_for(spec, self.threads().get())
    }

    /// What will run for the gradients of `spec` on `threads` threads of somebody else's pool.
    ///
    /// # Errors
    /// As [`Engine::plan_backward`].
    pub fn plan_backward_for(&self, spec: &BackwardSpec, threads: usize) -> Result<BackwardPlan> {
        match spec.forward().device {
            Device::Cpu => self.expect_host("the backward pass")?,
            device @ Device::Cuda(_) => return Engine::cuda(device)?.plan_backward(spec),
            _ => {}
        }
        rapt_cpu::select_backward(spec, &Caps { threads, ..self.caps().clone() })
    }

    /// Runs `plan` on this engine's threads; every gradient that is asked for is written when it returns.
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn run_backward(&self, plan: &BackwardPlan, operands: &mut BackwardOperands<'_>) -> Result<()> {
        self.run_backward_on(plan, operands, &Queue::Host(self.executor()))
    }

    /// Runs `plan` on somebody else's threads.
    ///
    /// # Errors
    /// As [`Engine::run_on`].
    pub fn run_backward_on(
        &self,
        plan: &BackwardPlan,
        operands: &mut BackwardOperands<'_>,
        queue: &Queue<'_>,
    ) -> Result<()> {
        let device = plan.spec().forward().device;
        if device != Device::Cpu {
            return Err(Error::DeviceMismatch { tensor: "queue", expected: device, got: Device::Cpu });
        }
        self.with_workspace(plan.workspace_bytes(), |workspace| match queue {
            Queue::Host(executor) => rapt_cpu::run_backward(plan, operands, workspace, *executor),
            _ => Err(Error::unsupported("this queue", "its run outlives the call", "use Engine::run_backward_async")),
        })
    }

    /// Enqueues `plan` on a stream and waits for nothing. `workspace` is memory of the device, of at least the plan's
    /// `workspace_bytes`, from whatever allocator the caller has. May be captured into a CUDA graph.
    ///
    /// # Errors
    /// As [`Engine::run_async`].
    ///
    /// # Safety
    /// As [`Engine::run_async`]: the gradients are the outputs.
    pub unsafe fn run_backward_async(
        &self,
        plan: &BackwardPlan,
        operands: &mut BackwardOperands<'_>,
        workspace: DeviceMemory,
        queue: &Queue<'_>,
    ) -> Result<()> {
        let expected = plan.spec().forward().device;
        match *queue {
            Queue::Cuda { device, stream } if expected == Device::Cuda(device) => {
                // SAFETY: as the caller promises.
                unsafe { Engine::cuda(expected)?.run_backward(plan, operands, workspace, stream) }
            }
            Queue::Cuda { device, .. } => {
                Err(Error::DeviceMismatch { tensor: "queue", expected, got: Device::Cuda(device) })
            }
            _ => Err(Error::unsupported("this queue", "its run ends with the call", "use Engine::run_backward_on")),
        }
    }

    /// Plans, proves and runs the gradients that `tensors` has places for: those of the call that wrote its `out` and `lse` with `options`, and
    /// with dropout with the same [`DropoutSeed`](rapt_core::DropoutSeed).
    ///
    /// ```
    /// use rapt::{BackwardTensors, Engine, Options, Tensors, View, ViewMut};
    ///
    /// let engine = Engine::new(Some(1))?;
    /// let (x, d_o) = ([0.5f32, -1.0, 0.25, 1.0], [1.0f32, 0.0, 0.0, 1.0]);
    /// let (mut out, mut lse, mut dq) = ([0.0f32; 4], [0.0f32; 2], [0.0f32; 4]);
    /// let shape = [1, 2, 2].into(); // one head, two queries and keys
    /// let x = View::contiguous("x", &x, shape)?;
    /// let forward = Tensors {
    ///     lse: Some(ViewMut::contiguous("lse", &mut lse, [1, 2].into())?),
    ///     ..Tensors::new(x, x, x, ViewMut::contiguous("out", &mut out, shape)?)
    /// };
    /// engine.attention_into(forward, &Options::default())?;
    /// let (out, lse) = (View::contiguous("out", &out, shape)?, View::contiguous("lse", &lse, [1, 2].into())?);
    /// let backward = BackwardTensors {
    ///     dq: Some(ViewMut::contiguous("dq", &mut dq, shape)?),
    ///     ..BackwardTensors::new([x, x, x], out, lse, View::contiguous("d_o", &d_o, shape)?)
    /// };
    /// engine.backward_into(backward, &Options::default())?;
    /// assert!(dq.iter().all(|x| *x != 0.0));
    /// # Ok::<(), rapt::Error>(())
    /// ```
    ///
    /// # Errors
    /// Any [`Error`]; nothing is written before everything is proven.
    pub fn backward_into(&self, tensors: BackwardTensors<'_>, options: &Options) -> Result<()> {
        let spec = backward_spec_of(&tensors, options)?;
        let plan = self.plan_backward(&spec)?;
        self.run_backward(&plan, &mut BackwardOperands::check(tensors, plan.spec())?)
    }
}

/// What `tensors` and `options` ask, without the pointers.
///
/// # Errors
/// Any [`Error`] of kind dtype, shape, option or device; as [`BackwardSpec::new`].
pub fn backward_spec_of(tensors: &BackwardTensors<'_>, options: &Options) -> Result<BackwardSpec> {
    spec_of(tensors, options, tensors.offsets.as_ref().map(|[q, kv]| [q, kv]))
}

/// The same, with sequences that lie between `offsets`.
pub(crate) fn spec_of(
    tensors: &BackwardTensors<'_>,
    options: &Options,
    offsets: Option<[&View<'_>; 2]>,
) -> Result<BackwardSpec> {
    let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, options);
    builder
        .mask(tensors.mask.as_ref())
        .sinks(tensors.sinks.as_ref())
        .alibi_slopes(tensors.alibi_slopes.as_ref())
        .out(&tensors.out)
        .lse(&tensors.lse);
    if let Some([q, kv]) = offsets {
        builder.varlen(q, kv);
    }
    let form = |view: &Option<ViewMut<'_>>| view.as_ref().map(TensorForm::from);
    let forms = GradientForms {
        d_o: (&tensors.d_o).into(),
        d_lse: tensors.d_lse.as_ref().map(TensorForm::from),
        dq: form(&tensors.dq),
        dk: form(&tensors.dk),
        dv: form(&tensors.dv),
        d_mask: form(&tensors.d_mask),
        d_sinks: form(&tensors.d_sinks),
    };
    BackwardSpec::new(builder.build()?, &forms)
}
