// Draw /openapi.json as a page. Strings become text nodes only: no description is parsed as HTML.

const LATER = 8; // levels of a schema that are expanded; deeper ones are named

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.flat().filter((child) => child !== null && child !== ""));
  return made;
}

/** Text with `code` in it, as nodes. */
function prose(text) {
  return (text ?? "").split("`").map((part, nth) => (nth % 2 ? element("code", {}, part) : part));
}

class Description {
  constructor(spec) {
    this.spec = spec;
  }

  resolve(schema) {
    return schema?.$ref
      ? this.spec.components.schemas[schema.$ref.split("/").pop()]
      : (schema ?? {});
  }

  /** Describe the type of a value in a few words. */
  kind(schema) {
    if (schema?.$ref) return schema.$ref.split("/").pop();
    const choices = schema?.anyOf ?? schema?.oneOf;
    if (choices) return choices.map((one) => this.kind(one)).join(" or ");
    if (schema?.enum) return schema.enum.map((one) => JSON.stringify(one)).join(", ");
    if (schema?.const !== undefined) return JSON.stringify(schema.const);
    if (schema?.type === "array") {
      if (schema.prefixItems)
        return `[${schema.prefixItems.map((one) => this.kind(one)).join(", ")}]`;
      return `list of ${this.kind(schema.items)}`;
    }
    const type = [schema?.type ?? "any JSON"].flat().join(" or ");
    const { minimum, maximum } = schema ?? {};
    if (minimum !== undefined && maximum !== undefined) return `${type}, ${minimum} to ${maximum}`;
    return minimum !== undefined ? `${type}, ${minimum} or more` : type;
  }

  /** Rows of a table: every key of an object; nested keys are joined with a dot. */
  rows(schema, above = "", level = 0) {
    const object = this.resolve(schema);
    return Object.entries(object.properties ?? {}).flatMap(([name, value]) => {
      const key = above + name;
      const inner = value.$ref || value.type === "object" ? this.resolve(value) : {};
      const deeper =
        inner.properties && level < LATER ? this.rows(inner, `${key}.`, level + 1) : [];
      const wanted = object.required?.includes(name) && level === 0;
      return [[key, this.kind(value), wanted, value.default, value.description ?? ""], ...deeper];
    });
  }

  example(schema, level = 0) {
    const plain = this.resolve(schema);
    if (plain.examples?.length) return plain.examples[0];
    if (plain.default !== undefined) return plain.default;
    if (plain.enum) return plain.enum[0];
    const choices = plain.anyOf ?? plain.oneOf;
    if (choices) return this.example(choices[0], level);
    if (plain.const !== undefined) return plain.const;
    if (plain.properties && level < LATER) {
      return Object.fromEntries(
        Object.entries(plain.properties).map(([key, value]) => [
          key,
          this.example(value, level + 1),
        ]),
      );
    }
    if (plain.type === "array") return plain.items ? [this.example(plain.items, level + 1)] : [];
    return { integer: 0, number: 0, boolean: false, object: {}, string: "" }[plain.type] ?? null;
  }
}

function table(heads, rows) {
  const head = element(
    "tr",
    {},
    heads.map((one) => element("th", { scope: "col" }, one)),
  );
  const body = rows.map((row) =>
    element(
      "tr",
      {},
      row.map((cell) => element("td", {}, [cell].flat())),
    ),
  );
  return element(
    "div",
    { class: "wide" },
    element("table", {}, element("thead", {}, head), element("tbody", {}, body)),
  );
}

function keysTable(rows, showDefaults) {
  return table(
    ["key", "value", ...(showDefaults ? ["default"] : []), "meaning"],
    rows.map(([key, kind, wanted, usual, meaning]) => [
      element("code", {}, key),
      kind + (wanted && showDefaults ? ", needed" : ""),
      ...(showDefaults ? [usual === undefined || usual === "" ? "" : JSON.stringify(usual)] : []),
      prose(meaning),
    ]),
  );
}

function curl(description, method, path, operation) {
  const place = path.replace(/\{(\w+)\}/g, (_, name) => {
    const told = operation.parameters?.find((one) => one.name === name)?.schema;
    return told?.examples?.[0] ?? name;
  });
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  const parts = ["curl"];
  if (method !== "get" && !(method === "post" && schema)) parts.push(`-X ${method.toUpperCase()}`);
  if (schema) {
    const object = description.resolve(schema.anyOf?.[0] ?? schema);
    const short =
      object.examples?.[0] ??
      Object.fromEntries(
        Object.entries(object.properties ?? {})
          .filter(
            ([name, value]) =>
              object.required?.includes(name) || (value.examples && name === "payload"),
          )
          .map(([name, value]) => [name, description.example(value)]),
      );
    parts.push(`--json '${JSON.stringify(short)}'`);
  }
  return `${parts.join(" ")} '${location.origin}${place}'`;
}

function drawOperation(description, method, path, operation) {
  const parameters = operation.parameters ?? [];
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const good = Object.entries(operation.responses).find(([status]) => status.startsWith("2"));
  const answer = good?.[1].content?.["application/json"]?.schema;
  const inner = [element("pre", {}, curl(description, method, path, operation))];
  if (parameters.length) {
    inner.push(
      element("h3", {}, "Parameters"),
      keysTable(
        parameters.map((one) => [
          one.name,
          description.kind(one.schema),
          one.required,
          one.schema?.default,
          one.description ?? "",
        ]),
        true,
      ),
    );
  }
  if (body) {
    const plain = body.anyOf?.[0] ?? body;
    inner.push(
      element("h3", {}, `Body, JSON${operation.requestBody.required ? "" : ", may be left out"}`),
      keysTable(description.rows(plain), true),
    );
  }
  inner.push(element("h3", {}, `Answer ${good?.[0] ?? ""}`));
  const shape = answer?.type === "array" ? answer.items : answer;
  const rows = shape ? description.rows(shape) : [];
  if (answer?.type === "array")
    inner.push(element("p", {}, `A list of ${description.kind(shape)}:`));
  if (rows.length) inner.push(keysTable(rows, false));
  else
    inner.push(
      element(
        "p",
        {},
        prose(answer ? description.kind(answer) : (good?.[1].description ?? "Nothing")),
      ),
    );
  inner.push(
    element("h3", {}, "Refusals"),
    table(
      ["status", "meaning"],
      Object.entries(operation.responses)
        .filter(([status]) => !status.startsWith("2"))
        .map(([status, answer]) => [status, prose(answer.description)]),
    ),
  );
  const head = element(
    "summary",
    {},
    element("span", { class: `method ${method}` }, method.toUpperCase()),
    element("code", {}, path),
    element("span", { class: "about" }, prose((operation.description ?? "").split("\n")[0])),
    operation["x-role"] ? element("span", { class: "role" }, operation["x-role"]) : null,
  );
  return element(
    "article",
    {
      id: operation.operationId,
      "data-words": `${method} ${path} ${operation.description}`.toLowerCase(),
    },
    element("details", {}, head, inner),
  );
}

function draw(spec) {
  const description = new Description(spec);
  const main = document.querySelector("[data-operations]");
  const index = document.querySelector("[data-index]");
  document.querySelector("[data-version]").textContent = spec.info.version;
  const paragraphs = spec.info.description.trim().split(/\n\n+/);
  main.replaceChildren(
    ...paragraphs.map((text) => element("p", {}, prose(text.replaceAll("\n", " ")))),
  );
  for (const tag of spec.tags) {
    main.append(element("h2", {}, tag.name), element("p", {}, tag.description));
    index.append(element("h2", {}, tag.name));
    for (const [path, operations] of Object.entries(spec.paths)) {
      for (const [method, operation] of Object.entries(operations)) {
        if (operation.tags?.[0] !== tag.name) continue;
        main.append(drawOperation(description, method, path, operation));
        const short = path.replace("/api/v1", "").replace("/queues/{name}", "…") || "/";
        index.append(
          element(
            "a",
            { href: `#${operation.operationId}`, title: `${method.toUpperCase()} ${path}` },
            element("span", { class: `method ${method}` }, method.toUpperCase()),
            ` ${short}`,
          ),
        );
      }
    }
  }
}

function openNamed() {
  const named = document.getElementById(location.hash.slice(1));
  if (!named) return;
  named.querySelector("details").open = true;
  named.scrollIntoView();
}

document.querySelector("[data-filter]").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  for (const article of document.querySelectorAll("article")) {
    article.hidden = !words.every((word) => article.dataset.words.includes(word));
  }
});
window.addEventListener("hashchange", openNamed);

const answer = await fetch("/openapi.json");
draw(await answer.json());
openNamed();
