//! What goes in and out of a program: names, dtypes, sizes.

use rapt_core::DType;
use rapt_pt2::{Argument, Expr, InputSpec, OutputSpec, Program, SymInt};

use super::{ModelError, SERVED};

/// An input or an output of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    /// How it is reached in the call, such as `past[0]`; `output['logits']` of a result.
    pub name: String,
    /// The dtype of a tensor; `None` for what is no tensor.
    pub dtype: Option<DType>,
    /// The sizes of a tensor: numbers, and expressions over the program's symbols. Empty for what is no tensor.
    pub sizes: Vec<String>,
    /// Whether the program writes it: an input whose content a call changes.
    pub is_written: bool,
    /// The text that an input was at export and is in every call. A call gives [`Input::None`](super::Input::None) for it.
    pub text: Option<String>,
}

impl Port {
    fn new(name: String, program: &Program, argument: &Argument) -> Port {
        let meta = if let Argument::Tensor(tensor) = argument { program.graph.tensors.get(tensor) } else { None };
        Port {
            name,
            dtype: meta.map(|meta| meta.dtype),
            sizes: meta.map_or(Vec::new(), |meta| meta.sizes.iter().map(Expr::to_string).collect()),
            is_written: false,
            text: if let Argument::String(text) = argument { Some(text.clone()) } else { None },
        }
    }
}

/// The inputs of the caller, by their names in the call.
pub(super) fn inputs(program: &Program) -> Vec<Port> {
    let given = program.signature.inputs.iter().filter_map(|input| match input {
        InputSpec::User(argument) => Some((name_of(argument), argument)),
        InputSpec::Fixed { name, value } => Some((name.as_str(), value)),
        InputSpec::Parameter { .. } | InputSpec::Buffer { .. } | InputSpec::Constant { .. } => None,
    });
    let port = |(place, (inner, argument)): (usize, (&str, &Argument))| {
        let name = program.call.as_ref().map_or_else(|| inner.to_owned(), |call| call.input_path(place));
        Port::new(name, program, argument)
    };
    given.enumerate().map(port).collect()
}

fn name_of(argument: &Argument) -> &str {
    match argument {
        Argument::Tensor(name) | Argument::SymInt(SymInt::Name(name)) => name,
        _ => "an input",
    }
}

/// The results of the caller, by their places in the output.
pub(super) fn outputs(program: &Program) -> Vec<Port> {
    let given = program.signature.outputs.iter().filter_map(|output| match output {
        OutputSpec::User(argument) => Some(argument),
        OutputSpec::BufferMutation { .. } | OutputSpec::InputMutation { .. } => None,
    });
    let name = |place: usize| {
        let mut path = "output".to_owned();
        match &program.call {
            Some(call) => call.output.path(place, &mut path),
            None => path.push_str(&format!("[{place}]")),
        }
        path
    };
    given.enumerate().map(|(place, argument)| Port::new(name(place), program, argument)).collect()
}

/// Refuses a program with a tensor of a dtype that is not served, by the tensor's name.
pub(super) fn check_dtypes(program: &Program) -> Result<(), ModelError> {
    let unserved = program.graph.tensors.iter().find(|(_, meta)| !SERVED.contains(&meta.dtype));
    match unserved {
        Some((name, meta)) => Err(ModelError::UnsupportedDtype { tensor: name.clone(), got: meta.dtype }),
        None => Ok(()),
    }
}
