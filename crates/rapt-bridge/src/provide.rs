//! The side that has the devices: [`Interface`] over the façade's `offload`, or over any other [`Offload`].

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rapt_core::{
    Device, Error, Extent, Kernel, Offload, Operands, PRounding, Plan, Result, TensorForm, Tensors, View, ViewMut,
};

use crate::abi::{Addresses, Facts, Interface, Request, Status, Tensor, Texts, VERSION, text};
use crate::refusal::OK;
use crate::request::{request_of, spec_of};

/// A library's devices, as its [`Interface`] reaches them.
pub trait Provider {
    /// What there is, a row each.
    fn report() -> Vec<(String, String)>;
    /// Opens the adapter of this index.
    ///
    /// # Errors
    /// Any: it arrives on the other side.
    fn open(adapter: u32) -> Result<Arc<dyn Offload>>;
}

/// The interface of the devices of `P`.
#[must_use]
pub const fn interface<P: Provider>() -> Interface {
    Interface { version: VERSION, report: report::<P>, open: open::<P>, close, plan, forget, run }
}

/// Runs `body`, whose error or panic becomes a code and texts.
fn guard(texts: Texts, body: impl FnOnce() -> Result<()>) -> Status {
    let done = catch_unwind(AssertUnwindSafe(body));
    match done.unwrap_or_else(|payload| Err(Error::worker_panicked(payload.as_ref()))) {
        Ok(()) => OK,
        Err(error) => texts.refuse(&error),
    }
}

/// A device as the other side holds it.
type Held = Arc<dyn Offload>;

unsafe extern "C" fn report<P: Provider>(texts: Texts) {
    guard(texts, || {
        for (name, row) in P::report() {
            texts.say(text::NAME, &name);
            texts.say(text::ROW, &row);
        }
        Ok(())
    });
}

unsafe extern "C" fn open<P: Provider>(adapter: u32, device: *mut *mut c_void, texts: Texts) -> Status {
    guard(texts, || {
        let held: Box<Held> = Box::new(P::open(adapter)?);
        // SAFETY: the caller's place for a pointer.
        unsafe { device.write(Box::into_raw(held).cast()) };
        Ok(())
    })
}

unsafe extern "C" fn close(device: *mut c_void) {
    // SAFETY: made by `open`, and given back once. A panic of a driver's end is nobody's to hear.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(device.cast::<Held>()) })));
}

unsafe extern "C" fn forget(plan: *mut c_void) {
    // SAFETY: made by `plan`, and given back once.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(plan.cast::<Plan>()) })));
}

unsafe extern "C" fn plan(
    device: *const c_void,
    request: *const Request,
    plan: *mut *mut c_void,
    facts: *mut Facts,
    texts: Texts,
) -> Status {
    guard(texts, || {
        // SAFETY: made by `open` and alive; a request of the caller's, of which every bit pattern is one.
        let (device, request) = unsafe { (&*device.cast::<Held>(), &*request) };
        let made = device.plan_host(&spec_of(request)?)?;
        let of = facts_of(&made)?;
        texts.say(text::WHY, &made.why());
        texts.say(text::WHY_NOT_FASTER, &made.why_not_faster());
        // SAFETY: the caller's places.
        unsafe {
            facts.write(of);
            plan.write(Box::into_raw(Box::new(made)).cast());
        }
        Ok(())
    })
}

fn place<T: PartialEq>(all: &[T], one: &T) -> Result<u32> {
    let at = all.iter().position(|other| other == one).and_then(|at| u32::try_from(at).ok());
    at.ok_or(Error::NotAsPlanned { tensor: "plan", what: "a kernel that does not cross" })
}

fn facts_of(plan: &Plan) -> Result<Facts> {
    let (key, cost) = (plan.key(), plan.cost());
    let of = |n: usize| n as u64;
    Ok(Facts {
        kernel: place(Kernel::ALL, &key.kernel)?,
        p_rounding: place(PRounding::ALL, &key.p_rounding)?,
        kv_in_place: u32::from(plan.kv_in_place()),
        has_work: u32::from(plan.work().is_some()),
        block_m: of(plan.block_m()),
        block_n: of(plan.block_n()),
        num_splits: of(plan.num_splits()),
        items: of(plan.items()),
        threads: of(plan.threads()),
        workspace_bytes: of(plan.workspace_bytes()),
        bytes_copied: of(cost.bytes_copied),
        bytes_packed: of(cost.bytes_packed),
        work: plan.work().map_or([0; 4], |w| [w.tasks, w.rows, w.rows_per_item, w.keys_per_item].map(of)),
        launch: plan
            .launch()
            .map_or([0; 4], |l| [l.blocks, l.block_threads, l.shared_bytes, l.multiprocessors].map(of)),
        flops: cost.flops,
        exponentials: cost.exponentials,
        bytes_read: cost.bytes_read,
        bytes_written: cost.bytes_written,
        floor_cycles: cost.floor_cycles,
        floor_seconds: cost.floor_seconds.unwrap_or(f64::NAN),
    })
}

unsafe extern "C" fn run(
    device: *const c_void,
    plan: *const c_void,
    addresses: *const Addresses,
    texts: Texts,
) -> Status {
    guard(texts, || {
        // SAFETY: made by `open` and by `plan`, and alive; the caller's addresses.
        let (device, plan, at) = unsafe { (&*device.cast::<Held>(), &*plan.cast::<Plan>(), &*addresses) };
        let request = request_of(plan.spec(), device.device())?;
        let input = |name: &'static str, form: TensorForm, at: *const u8| {
            // SAFETY: the other side proved that tensors of this plan's forms lie at these addresses, readable for the call.
            unsafe {
                View::from_raw_parts(name, at, form.dtype, form.shape, form.strides, Device::Cpu, Extent::Declared)
            }
        };
        let output = |name: &'static str, form: TensorForm, at: *mut u8| {
            // SAFETY: the same, and that nobody else has them.
            unsafe {
                ViewMut::from_raw_parts(name, at, form.dtype, form.shape, form.strides, Device::Cpu, Extent::Declared)
            }
        };
        let needed = |name: &'static str, tensor: &Tensor| {
            tensor.form(name)?.ok_or(Error::NotAsPlanned { tensor: name, what: "presence" })
        };
        let maybe =
            |name: &'static str, tensor: &Tensor, at| tensor.form(name)?.map(|form| input(name, form, at)).transpose();
        let tensors = Tensors {
            mask: maybe("mask", &request.mask, at.mask)?,
            sinks: maybe("sinks", &request.sinks, at.sinks)?,
            alibi_slopes: maybe("alibi_slopes", &request.alibi_slopes, at.alibi_slopes)?,
            lse: request.lse.form("lse")?.map(|form| output("lse", form, at.lse)).transpose()?,
            ..Tensors::new(
                input("q", needed("q", &request.q)?, at.q)?,
                input("k", needed("k", &request.k)?, at.k)?,
                input("v", needed("v", &request.v)?, at.v)?,
                output("out", needed("out", &request.out)?, at.out)?,
            )
        };
        device.run_host(plan, &mut Operands::check(tensors, plan.spec())?)
    })
}
