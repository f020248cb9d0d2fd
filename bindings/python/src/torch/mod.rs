//! PyTorch's own attention as Rapt serves it.
//!
//! ```text
//! frame     any rank as pieces of four dimensions
//! call      the tensors of a call, and one piece of it run
//! dropout   which weights a call drops
//! decide    who answers a request: Serve, Fallback(reason), Refuse; pure
//! request   a call as `decide` needs it, and its refusals as typed errors
//! output    a tensor with the strides of PyTorch's own answer
//! kernel    the kernel that PyTorch calls, with the answers that it gave before
//! training  nodes of PyTorch's own for what that kernel computed
//! node      a call whose inputs require grad
//! stats     how many calls were served
//! python    what the Python files of rapt.torch call
//! ```

pub(crate) mod call;
pub(crate) mod decide;
pub(crate) mod dropout;
pub(crate) mod frame;
pub(crate) mod kernel;
pub(crate) mod node;
pub(crate) mod output;
pub(crate) mod python;
pub(crate) mod request;
pub(crate) mod stats;
pub(crate) mod training;
