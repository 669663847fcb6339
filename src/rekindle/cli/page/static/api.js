// Asks the server. Where it wants a token, the reader is asked for it; it stays in this tab.

export class Refused extends Error {}
export class NeedsToken extends Refused {}

export const giveToken = (token) => sessionStorage.setItem("token", token);

export async function ask(path) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(`/api/${path}`, { headers, cache: "no-store", signal: AbortSignal.timeout(15000) });
  if (answer.status === 401) throw new NeedsToken(token ? "this is not the token" : "a token is needed");
  if (!answer.ok) throw new Refused(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}
